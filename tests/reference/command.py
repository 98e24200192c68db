"""A case as the command runs it, with a config and a run's folder."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import TensorDataset

from fedbn_flwr import personal_state
from fedbn_flwr.errors import NothingTrainedError, StateError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.results.folder import read_metrics
from fedbn_flwr.lab.runs import node
from fedbn_flwr.lab.runs.run import run as run_config
from tests.reference.federation import RATE
from tests.reference.networks import network
from tests.support.runs import clients_of

KEYS = {"eta": "server-learning-rate"}


def config_of(case: Any, settings: dict, module: str) -> Config:
    """Return the config of a case."""
    (main,) = case.methods or ("fedavg",)
    # The command has no key for this setting, and the case has the default.
    settings.pop("fedtan_exchanges", None)
    tests = ["personal-own"]
    if not case.has("standalone"):
        tests.append("averaged-bn" if case.eval_on == "averaged-bn" else "global")
    values = {
        "strategy": main,
        "dataset": f"{module}:examples",
        "model": f"{module}:model",
        "num-clients": len(case.sizes),
        "num-server-rounds": case.rounds,
        "seed": case.seed,
        "fraction-train": case.fraction,
        "batch-size": case.batch_size,
        "local-steps": case.steps,
        "local-epochs": 0 if case.steps else 1,
        "optimizer": case.optimizer,
        "weight-decay": case.weight_decay,
        "learning-rate": RATE,
        "eval-on": ",".join(tests),
        "eval-every": case.eval_every,
    }
    values |= {
        key: value
        for key, value in {
            "sgd-momentum": case.momentum,
            "personal": case.personal,
            "layers": settings.pop("layers", ""),
            "momentum-scope": ""
            if case.momentum_scope == "none"
            else case.momentum_scope,
            "agc": case.agc,
            "train-only": case.trains,
            "variance": "" if case.variance == "mean" else case.variance,
            "recalibrate": case.recalibrate,
            "fine-tune": case.fine_tune,
        }.items()
        if value
    }
    if case.decay:
        values["lr-decay-at"] = "freeze" if case.decay == "freeze" else "1"
        values["lr-decay-factor"] = "0.5"
    values |= {
        KEYS.get(name, name.replace("_", "-")): value
        for name, value in settings.items()
    }
    return Config.make({key: value for key, value in values.items() if value != ""})


def run(case: Any, data: Sequence[tuple[Tensor, Tensor]], result: Any):
    """Run the config, and read the run's folder."""
    from tests.reference.package import faulty, settings_of

    dtype = getattr(torch, case.dtype)
    module = ModuleType(f"case_{abs(hash((case, float(data[0][0].sum()))))}")
    module.examples = lambda site, part: TensorDataset(*data[site])
    module.model = lambda: network(case.model, dtype, case.optimizer != "sgd")
    sys.modules[module.__name__] = module
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(node, "TorchClient", faulty(case)),
        ):
            out = Path(folder) / "run"
            config = config_of(case, settings_of(case), module.__name__)
            try:
                run_config(config, out, workers=0)
                result.used = True
            except NothingTrainedError:
                return result
            return _read(case, out, result)
    finally:
        del sys.modules[module.__name__]


def _read(case: Any, out: Path, result: Any):
    # Standalone has a global model only if train_only leaves entries fixed.
    if not case.has("standalone") or case.trains:
        state = load_file(out / "model.safetensors")
        result.history[case.rounds] = state
    for i in range(len(case.sizes)):
        with suppress(StateError):  # it has not trained
            result.models[i] = personal_state(out, client=i)
    for line in read_metrics(out / "metrics.jsonl"):
        tests = {}
        for client, values in clients_of(out, line["round"]).items():
            if "own-loss" in values:
                tests[client] = {"loss": values["own-loss"]}
        result.tests.append(tests)
    return result
