"""A config key under a strategy changes the result, or is refused.

Each run has 3 clients and 4 rounds on scikit-learn's digits. A key is set together with
the settings that it needs (``norm-groups`` with ``norm=group``), and once without them.
It acts if the final SHA-256 or a figure of ``metrics.jsonl`` changes, except the
seconds. The other value and the needs follow from the key's type, limits and
``only_if``.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from fedbn_flwr.errors import FedBNError
from fedbn_flwr.lab.config import GROUPS, Config
from fedbn_flwr.lab.config.fields import ONLY_IF, defaults_of
from fedbn_flwr.lab.data import PARTITIONS
from fedbn_flwr.lab.data.datasets import DATASETS
from fedbn_flwr.lab.results.files import read_metrics
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.norms import NORMS
from fedbn_flwr.training.tasks import TASKS

REGISTRIES = {
    "dataset": DATASETS,
    "norm": NORMS,
    "partition": PARTITIONS,
    "task": TASKS,
}
BASE = {
    "num-clients": 3,
    "num-server-rounds": 4,
    "local-steps": 2,
    "batch-size": 8,
    "learning-rate": 0.2,
}
FEDWON = {"norm": "wsconv", "model": "lenet"}
"""Settings that FedWon requires."""
OWN = {
    "fedwon": FEDWON,
    "fixbn": {"freeze-at": 2},
    "fedtan2": {"fedtan-rounds": 2},
    # momentum begins again with the body
    "fedrep": {"local-steps": 5},
    # its second phase begins after five rounds with equal losses
    "fedbs": {"num-server-rounds": 7, "partition": "iid", "batch-size": 64},
}
CLIPPED = {"dp": "server", "dp-clipping-norm": 0.05, "eval-on": "global"}
TEST_BN = {"eval-on": "global-test-bn", "test-bn": "mix"}
DOMAINS = {
    "dataset": "digits-domains",
    "partition": "domain",
    "num-clients": 5,
    "model": "lenet",
}
AUTO = {"freeze-at": "auto", "fedtan-rounds": "auto", "freeze-tau": 1e9}

# Keys whose other value, or the settings that it needs, cannot be derived.
OF_HAND = {
    "num-classes": (12, {}),
    "dataset": ("digits-domains", {"model": "lenet"}),
    "image-size": (80, {"model": "lenet"}),
    "domain-share": (0.5, DOMAINS),
    "train-only": ("fc,norm", {}),
    "num-server-rounds": (8, {}),
    "eval-on": ("personal-own,personal-global", {}),
    "test-bn": ("mix", {**TEST_BN, "test-bn": "batch"}),
    "metrics": ("balanced-accuracy", {}),
    "local-epochs": (2, {"local-steps": 0}),
    "augment": ("crop2", {}),
    "lr-decay-at": ("1", {}),
    "lr-decay-factor": ("0.5", {"lr-decay-at": "1"}),
    "momentum-scope": ("local", {"sgd-momentum": 0.9}),
    "agc": (0.01, {}),
    "layers": ("norm2", {"model": "lenet"}),
    "partition": ("dirichlet", {}),
    "personal": ("fc", {}),
    "fine-tune": (2, {"eval-on": "personal-own"}),
    "freeze-at": (1, {}),
    "freeze-window": (3, {**AUTO, "freeze-window": 2}),
    "freeze-tau": (1e-30, {**AUTO, "freeze-window": 2}),
    "fedtan-rounds": (1, {}),
    "dp": ("server", {"eval-on": "global"}),
    "dp-clipping-norm": (0.01, CLIPPED),
}
# Keys that change no figure of such a run. Noise differs in each run.
WITHOUT_FIGURES = {
    *("strategy", "task", "test-share", "round-timeout", "early-stopping"),
    *("on-divergence", "torch-threads", "class-moments", "fedtan-transport"),
    *("dp-noise-multiplier", "dp-delta", "checkpoint-every", "resume"),
}


def tried() -> dict[str, tuple[Any, dict]]:
    """Return each key with another value and the settings that it needs.

    A text without listed values is no key of this table, unless it is in ``OF_HAND``.
    """
    found = {}
    for key in [key for group in GROUPS for key in Config.keys(group)]:
        derived = (another_value(key), needs(key))
        value, beside = OF_HAND.get(key, derived)
        if value is not None and key not in WITHOUT_FIGURES:
            found[key] = (value, beside)
    return found


def another_value(key: str):
    """Return another value of a key than the one of the runs, or None."""
    field = Config.model_fields[key.replace("-", "_")]
    value = BASE.get(key, field.default)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        least = next((one.ge for one in field.metadata if hasattr(one, "ge")), 0)
        return value - 1 if value > least else value + 1
    if isinstance(value, float):
        return value / 2 if value else 0.5
    names = get_args(field.annotation)[::-1]
    names = names or [*REGISTRIES.get(key, ())]
    return next((name for name in names if name != value), None)


def needs(key: str) -> dict:
    """Return the settings without which a key has no effect."""
    found = {}
    for other, values in ONLY_IF[key].items():
        if isinstance(values, tuple) and defaults_of(Config)[other] not in values:
            found[other] = values[0]
    return found


KEYS = tried()


def result(settings: Mapping):
    """Return a run's SHA-256 and figures, or the error that refuses it."""
    return _result(json.dumps(settings, sort_keys=True))


@functools.cache
def _result(settings: str):
    with tempfile.TemporaryDirectory() as folder:
        try:
            summary = run(Config.make(json.loads(settings)), Path(folder) / "out")
        except FedBNError as error:
            return error
        lines = read_metrics(Path(folder) / "out" / "metrics.jsonl")
    for line in lines:
        line.pop("seconds", None)
    return {"sha256": summary["sha256"], "figures": lines}


def effect(strategy: str, key: str) -> tuple[str, str]:
    """Return the effect of a key with and without the settings that it needs.

    An effect is "acts" or "refused", or "" without an effect.
    """
    value, needs = KEYS[key]
    start = {**BASE, "strategy": strategy, **OWN.get(strategy, {})}
    return _compared(_shared(needs, start), key, value), _compared(start, key, value)


def _shared(needs: Mapping, start: Mapping) -> dict:
    """Return the settings plus a key's needs, without the strategy's unknown keys."""
    try:
        _, dropped = Config.make_of_shared(
            needs, {key: v for key, v in start.items() if key not in needs}
        )
    except FedBNError:
        dropped = {}
    return {**start, **{name: v for name, v in needs.items() if name not in dropped}}


def _compared(settings: Mapping, key: str, value: Any) -> str:
    before, after = result(settings), result({**settings, key: value})
    if isinstance(after, FedBNError):
        return "refused"
    return "acts" if after != before else ""
