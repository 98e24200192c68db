"""The methods that ``advise`` tries, with the reason for each.

Three references are always tried: training alone, FedAvg with BatchNorm and FedAvg with
GroupNorm. The other candidates are the remedies of the doctor's findings, then the
first choices for the situation, as in ``docs/choose.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedbn_flwr.doctor.findings import Finding
from fedbn_flwr.doctor.situations import FEATURE_SHIFT, SITUATIONS, label_skew
from fedbn_flwr.errors import ConfigError, FedBNError
from fedbn_flwr.lab.config import (
    CENTRALIZED,
    Config,
    Scalar,
    method_of,
    read_overrides,
)
from fedbn_flwr.lab.early_stopping import validation_metric
from fedbn_flwr.lab.runs.check_start import checked_config
from fedbn_flwr.strategies import STRATEGIES

Settings = Mapping[str, Scalar]

ALONE, FEDAVG = "Training alone", "FedAvg+BN"
_OF_METHOD = (*("strategy", "local-part", "client-hooks", "server-step"), "norm")
_NOT_SHARED = (*_OF_METHOD, "learning-rate", "seed", "out", "resume", "series")


@dataclass(frozen=True, eq=False)
class Candidate:
    """A method to try.

    Attributes:
        name: its name in tables and folders.
        settings: the settings that make the method. They override the shared settings.
        why: the reason to try it.
        metric: the name of its score on the validation examples.
    """

    name: str
    settings: Settings
    why: str
    metric: str = ""


_REFERENCES = (
    Candidate(
        FEDAVG, {"strategy": "fedavg"}, "the reference that other methods must beat"
    ),
    Candidate(
        ALONE,
        {"strategy": "standalone", "eval-on": "personal-own"},
        "a federation is worth its cost only if it is better than each site alone",
    ),
    Candidate(
        "FedAvg+GN",
        {"strategy": "fedavg", "norm": "group"},
        "the simplest replacement of BatchNorm",
    ),
)


def shared_settings(given: Settings) -> dict[str, Scalar]:
    """Return the user's settings without those that make the method, rate or seed."""
    return {key: value for key, value in given.items() if key not in _NOT_SHARED}


def candidates(
    given: Settings,
    base: Settings,
    findings: Sequence[Finding],
    asked: Iterable[str] = (),
    local_steps: int = 0,
    most: int = 6,
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the methods to try, and the reason for each method that cannot be tried.

    Args:
        given: the user's settings; their method is a candidate.
        base: the settings that all candidates share.
        findings: the doctor's findings about FedAvg with BatchNorm.
        asked: methods to try instead of those that the findings suggest, such as
            "fedbn" or "fixbn lr-decay-at=freeze".
        local_steps: the number E of local steps in a round; 0 if it is unknown.
        most: the largest number of candidates.

    Raises:
        ConfigError: an asked method cannot be tried.
    """
    tried: list[Candidate] = []
    left_out: dict[str, str] = {}
    seen: list[Any] = []
    wanted = [_asked(text) for text in asked]
    own = {key: given[key] for key in _OF_METHOD if key in given}
    others = wanted or [
        *([Candidate(_name(own), own, "your config has it")] if own else []),
        *_suggested(base, findings, local_steps),
    ]
    for one in (*_REFERENCES, *others):
        if len(tried) == most and one not in wanted:
            break
        try:
            config = Config.make_of_shared(base, one.settings)[0]
            checked_config(config)
            if config.eval_on == "global" and method_of(config).methods.own_models:
                raise ConfigError(
                    "its sites keep a part of the model, so there is no single model for"
                    " eval-on=global."
                )
        except FedBNError as error:
            if one in wanted:
                raise ConfigError(f"methods: {one.name}: {error}") from error
            # the first line has the reason; the others name keys
            left_out.setdefault(one.name, str(error).splitlines()[0])
            continue
        same = config.to_mapping()
        if same not in seen and one.name not in [other.name for other in tried]:
            seen.append(same)
            metric = validation_metric(config)
            tried.append(Candidate(one.name, one.settings, one.why, metric))
    return tried, left_out


def _asked(text: str) -> Candidate:
    """Return the method of a text such as "fedbn" or "fixbn lr-decay-at=freeze"."""
    first, *settings = text.split() or [""]
    known = [remedy for one in SITUATIONS for remedy in one.tries]
    setting = first if "=" in first else f"strategy={first}"
    if not settings:
        # The settings of the method that the pages recommend, but with the test that
        # all methods have.
        recipes = {remedy.setting.split()[0]: remedy.setting for remedy in known}
        words = recipes.get(setting, setting).split()
        setting = " ".join(one for one in words if not one.startswith("eval-on="))
    values = read_overrides([*setting.split(), *settings])
    if values.get("strategy") == CENTRALIZED:
        raise ConfigError(
            f"methods: {CENTRALIZED} trains on the data of all sites, so it cannot be"
            " advice for sites. `fedbn-flwr run` trains it as a reference."
        )
    return Candidate(_name(values), values, "you asked for it")


def _suggested(
    base: Settings, findings: Sequence[Finding], local_steps: int
) -> Iterator[Candidate]:
    """Yield the methods that the findings and the situation suggest, in order."""
    for finding in findings:
        for remedy in finding.remedies:
            yield from _of_setting(
                remedy.setting, f"a remedy for {finding.id}: {remedy.why}"
            )
    skew = label_skew(local_steps)
    personal = str(base["eval-on"]).startswith("personal")
    for one in (FEATURE_SHIFT, skew) if personal else (skew, FEATURE_SHIFT):
        for remedy in one.tries:
            yield from _of_setting(
                remedy.setting, f"a choice for {one.seen}: {remedy.why}"
            )


def _of_setting(setting: str, why: str) -> Iterator[Candidate]:
    """Yield the method that a remedy sets, or nothing if it sets no method."""
    words = setting.split()
    if all("=" in word for word in words):
        values = read_overrides(words)
        if values.keys() & {"strategy", "norm"} and "eval-on" not in values:
            yield Candidate(_name(values), values, why)


def _name(settings: Settings) -> str:
    """Return a name such as "FixBN" or "FedAvg+group"."""
    strategy, norm = settings.get("strategy", "fedavg"), settings.get("norm", "batch")
    kind = STRATEGIES.get(str(strategy))
    parts = [kind.__name__ if kind else str(strategy)]
    parts += [str(settings[key]) for key in _OF_METHOD[1:4] if settings.get(key)]
    if norm != "batch":
        parts.append({"group": "GN"}.get(str(norm), str(norm)))
    elif parts == ["FedAvg"]:
        return FEDAVG
    return "+".join(parts)
