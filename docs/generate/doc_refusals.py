"""The table of what each protection refuses, in the guide *privacy*: every row is tried when the table is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedbn_flwr.errors import FedBNError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.runs.start_checks import check
from fedbn_flwr.server.shared_bn import SHARED_BN

__all__ = ["refusals_table"]

_NOISE = {"dp": "server", "dp-noise-multiplier": 1.0}
_SECRET = {"dp-sampling": "secret", "dp-neighbours": "replace-one"}
_MASKS = {"masked-sums": True, "eval-on": "global"}
_RECORDS = {"record-dp": True, "record-dp-noise-multiplier": 1.0, "local-steps": 2}
_FEATURES = {"dataset": "digits", "num-clients": 4}
_REPORTS: list[Mapping[str, Any]] = [{"eval-on": "personal-own"}, {"validation-share": 0.2}, {"held-out-clients": "1"}]
_OF_METHODS: list[Mapping[str, Any]] = [
    {"strategy": "scaffold"},
    {"strategy": "fedbs"},
    {"strategy": "hbn", "share-alpha": True},
    {"variance": "pooled"},
    {"strategy": "fixbn", "freeze-at": "auto", "freeze-window": 2, "freeze-tau": 1e-6},
    {"strategy": "fedbn", "eval-on": str(SHARED_BN)},
]
_OF_UPDATES: list[Mapping[str, Any]] = [
    {"strategy": "standalone"},
    {"strategy": "staticbn"},
    {"strategy": "fedtan"},
    {"recalibrate": True},
    {"momentum-scope": "global", "sgd-momentum": 0.9},
]
TRIED: list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]] = [
    (_NOISE, [*_OF_METHODS, *_OF_UPDATES, *_REPORTS, {"min-replies": 2}, {"norm": "batch-renorm"}]),
    (_NOISE, [{"dp-target-epsilon": 1.0}, {"dp": "client", "dp-clipping": "adaptive"}]),
    (_NOISE, [{"dp-sampling": "secret"}, {**_SECRET, "dp-metrics": "published"}]),
    (_MASKS, [*_OF_METHODS, *_REPORTS, {"strategy": "fedtan", "fedtan-exchanges": "2L+1"}, {"norm": "batch-renorm"}]),
    (_MASKS, [{"strategy": "silobn", "recalibrate": True}, {"dp": "server"}]),
    (_MASKS, [{"num-clients": 1}]),
    (_RECORDS, [{"norm": "batch"}, {"norm": "batch-renorm"}, {"strategy": "fixbn"}]),
    (
        {**_RECORDS, "norm": "group"},
        [
            {"strategy": "scaffold"},
            {"strategy": "fedbs"},
            {"standardise": "local"},
            {"compile": True},
            {"masked-sums": True},
            {"validation-share": 0.2},
            {"record-dp-target-epsilon": 3.0},
        ],
    ),
    (
        {**_RECORDS, **_NOISE, "strategy": "fixbn", "freeze-at": 2},
        [
            {"dp": "server", "strategy": "fedavg"},
            {"dp": "server", "local-part": "mtfl", "eval-on": "global"},
            {"dp": "server", "momentum-scope": "local", "sgd-momentum": 0.9},
        ],
    ),
]


def refusals_table() -> str:
    """Return a table of settings and what is said of them.

    Raises:
        RuntimeError: settings that must be refused are accepted.
    """
    lines = ["| settings | refused, because |", "|---|---|"]
    for common, cases in TRIED:
        for case in cases:
            first = dict([next(iter(common.items()))])  # the rest is what a run with this protection needs anyway
            shown = ", ".join(f"`{key}={_text(value)}`" for key, value in {**first, **case}.items())
            lines.append(f"| {shown} | {_reason({**_FEATURES, **common, **case})} |")
    return "\n".join(lines)


def _reason(settings: Mapping[str, Any]) -> str:
    try:
        check(Config.make(settings))
    except FedBNError as error:
        first = next(line for line in str(error).splitlines() if line.strip() and not line.endswith(":"))
        return first.strip().removeprefix("- ").replace("|", "\\|")
    raise RuntimeError(f"accepted, and the guide says refused: {settings}")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
