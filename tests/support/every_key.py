"""A config key under a strategy changes the result, or is refused.

Each run has 3 clients and 4 rounds on scikit-learn's digits. A key is set together with
the settings that it needs (``norm-groups`` with ``norm=group``), and once without them.
It acts if the final SHA-256 or a figure of ``metrics.jsonl`` changes, except the
seconds. ``ELSEWHERE`` lists the keys that change neither in such a run, each with the
test that shows its effect.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import FedBNError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.files import read_metrics
from fedbn_flwr.lab.runs.run import run

BASE: dict[str, Any] = {
    "num-clients": 3,
    "num-server-rounds": 4,
    "local-steps": 2,
    "batch-size": 8,
    "learning-rate": 0.2,
}
OWN: dict[str, dict[str, Any]] = {
    "fedwon": {"norm": "wsconv", "model": "lenet"},
    "fixbn": {"freeze-at": 2},
    "fedtan2": {"fedtan-rounds": 2},
    # its second phase begins after round 5
    "fedbs": {"num-server-rounds": 7},
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

# Each key with another value and the settings that it needs.
KEYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "norm": ("group", {}),
    "norm-groups": (1, {"norm": "group"}),
    "feature-norm": ("1", {}),
    "model": ("digits-cnn", {}),
    "num-classes": (12, {}),
    "dataset": ("digits-domains", {"model": "lenet"}),
    "image-size": (80, {"model": "alexnet-bn-small"}),
    "partition": ("iid", {}),
    "partition-alpha": (9.0, {"partition": "dirichlet"}),
    "domain-share": (0.5, DOMAINS),
    "classes-per-client": (3, {}),
    "num-clients": (4, {}),
    "train-only": ("fc,norm", {}),
    "num-server-rounds": (8, {}),
    "fraction-train": (0.5, {}),
    "validation-share": (0.3, {}),
    "eval-every": (2, {}),
    "eval-on": ("personal-own,personal-global", {}),
    "test-bn": ("mix", {**TEST_BN, "test-bn": "batch"}),
    "metrics": ("balanced-accuracy", {}),
    "seed": (1, {}),
    "local-steps": (3, {}),
    "local-epochs": (2, {"local-steps": 0}),
    "batch-size": (4, {}),
    "augment": ("crop2", {}),
    "learning-rate": (0.1, {}),
    "lr-decay-at": ("1", {}),
    "lr-decay-factor": ("0.5", {"lr-decay-at": "1"}),
    "sgd-momentum": (0.9, {}),
    "momentum-scope": ("local", {"sgd-momentum": 0.9}),
    "weight-decay": (0.01, {}),
    "optimizer": ("adam", {}),
    "bn-momentum": (0.5, {}),
    "agc": (0.01, {}),
    "amp": (True, {}),
    "layers": ("norm2", {"model": "lenet"}),
    "personal": ("fc", {}),
    "head-steps": (0, {}),
    "fine-tune": (2, {"eval-on": "personal-own"}),
    "variance": ("pooled", {}),
    "recalibrate": (True, {}),
    "freeze-at": (1, {}),
    "freeze-affine": (True, {}),
    "freeze-window": (3, {**AUTO, "freeze-window": 2}),
    "freeze-tau": (1e-30, {**AUTO, "freeze-window": 2}),
    "proximal-mu": (0.5, {}),
    "server-learning-rate": (0.5, {}),
    "server-momentum": (0.5, {}),
    "fedtan-rounds": (1, {}),
    "dp": ("server", {"eval-on": "global"}),
    "dp-clipping-norm": (0.01, CLIPPED),
}
OWN_DATA = "tests/lab/data/test_own_data.py"
ELSEWHERE = {
    "strategy": "tests/strategies/test_combinations.py",
    "data-dir": "tests/lab/data/test_loading.py",
    "task": "tests/lab/test_one_number_everywhere.py",
    "loop": "tests/lab/runs/test_own_loop.py",
    "test-share": OWN_DATA,
    "held-out-clients": "tests/lab/output/test_held_out.py",
    "round-timeout": "tests/lab/test_setup.py",
    "init": "tests/lab/runs/test_init.py",
    "device": "tests/lab/test_setup.py",
    "torch-threads": "tests/engines/test_workers.py",
    "fedtan-transport": "tests/strategies/test_fedtan_in_flowers_loop.py",
    "fedtan-bind": "tests/strategies/test_fedtan.py",
    "fedtan-address": "tests/lab/test_setup.py",
    "fedtan-tls-dir": "tests/transport/test_grpc_channel.py",
    "on-divergence": "tests/lab/runs/test_divergence.py",
    "out": "tests/lab/output/test_output.py",
    "checkpoint-every": "tests/lab/output/test_checkpoint.py",
    "state-dir": "tests/client/test_kept_store.py",
    "resume": "tests/lab/runs/test_resume.py",
    "class-moments": "tests/server/test_class_moments.py",
    "early-stopping": "tests/lab/test_early_stopping.py",
    # Masks do not change the result.
    # Noise differs in each run.
    "dp-noise-multiplier": "tests/privacy/test_differential.py",
    "dp-delta": "tests/privacy/test_differential.py",
}


def result(settings: Mapping[str, Any]) -> Any:
    """Return a run's SHA-256 and figures, or the error that refuses it."""
    return _result(json.dumps(settings, sort_keys=True))


@functools.cache
def _result(settings: str) -> Any:
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


def _shared(needs: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings plus a key's needs, without the strategy's unknown keys."""
    try:
        _, dropped = Config.make_of_shared(
            needs, {key: v for key, v in start.items() if key not in needs}
        )
    except FedBNError:
        dropped = {}
    return {**start, **{name: v for name, v in needs.items() if name not in dropped}}


def _compared(settings: Mapping[str, Any], key: str, value: Any) -> str:
    before, after = result(settings), result({**settings, key: value})
    if isinstance(after, FedBNError):
        return "refused"
    return "acts" if after != before else ""
