"""The centralized reference: a plain torch loop over the union of the clients' data."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import nn

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.errors import DivergedError
from fedbn_flwr.experiment.config import Config
from fedbn_flwr.experiment.data.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.experiment.data.report import refuse_other_data
from fedbn_flwr.experiment.early_stopping import EarlyStopping
from fedbn_flwr.experiment.files import read_metrics
from fedbn_flwr.experiment.output.checkpoint import Checkpoint, Checkpoints
from fedbn_flwr.experiment.output.folder import DIVERGED_AT, RunFolder, lock_folder
from fedbn_flwr.experiment.output.recorder import OnRound, Recorder
from fedbn_flwr.experiment.output.run_notes import log_feature_norm, log_initial, report_data
from fedbn_flwr.experiment.setup import initialise, local_training, training_model
from fedbn_flwr.experiment.start_checks import check
from fedbn_flwr.messages.protocol import DROPPED_BATCHES, EXAMPLES_PROCESSED, TRAIN_ACCURACY, TRAIN_LOSS
from fedbn_flwr.messages.records import tensors, to_state
from fedbn_flwr.seeds import torch_generator
from fedbn_flwr.server.failures import TOO_LARGE_STEPS, divergence
from fedbn_flwr.server.report import RoundReport
from fedbn_flwr.training import make_optimizer, train
from fedbn_flwr.training.loop import TrainResult
from fedbn_flwr.training.wrappers import load_state, unwrap

__all__ = ["centralized", "reference_config"]

logger = logging.getLogger("flwr")

_OPTIMIZER = "optimizer"  # in a checkpoint, in place of a strategy's state


def centralized(config: Config, out: Path, on_round: OnRound | None = None) -> dict[str, Any]:
    """Run the reference over the union of the clients' data, E steps or epochs per "round", and write its folder.

    One optimizer is used for all rounds; everything else is as for a client. Arguments and errors are those of
    ``serve``.
    """
    for line in (*check(config), *config.late_decays()):
        logger.warning("%s", line)
    config = reference_config(config)
    with lock_folder(out), ExitStack() as closing:
        return _centralized(config, out, on_round, closing)


def reference_config(config: Config) -> Config:
    """Return the config with the tests that the reference can do: those of a global model."""
    tests = [name for name in config.evaluations() if name.startswith("global")] or ["global"]
    return config.model_copy(update={"eval_on": ",".join(tests)})


def _centralized(config: Config, out: Path, on_round: OnRound | None, closing: ExitStack) -> dict[str, Any]:
    data = partitioned_data(config, count_clients(config))
    model = training_model(config)
    plain = unwrap(model)
    log_feature_norm(plain)
    shapes = {name: tuple(value.shape) for name, value in plain.state_dict().items()}
    checkpoints = Checkpoints(out, config, split_state(plain).fingerprint(shapes))
    begun = config.resume and RunFolder.begun(out)
    if begun:
        refuse_other_data(out, config)
    saved = checkpoints.to_resume() if begun else None
    if saved is None:
        log_initial(initialise(plain, config))
    else:
        load_state(plain, tensors(saved.state))
    settings = local_training(config)
    optimizer = make_optimizer(model, settings)
    if saved:
        logger.info("resumed after round %d from %s", saved.server_round, checkpoints.folder)
        _restore(optimizer, saved.strategy[_OPTIMIZER])
        checkpoints.set_aside_after(saved.server_round)
    after = saved.server_round if saved else 0
    folder = closing.enter_context(RunFolder(out, config, after if begun else None))
    report_data(folder, config, data)
    recorder = Recorder(folder, config, plain, data, None, on_round)
    stopping = recorder.stopping
    best = checkpoints.best(stopping) if saved and stopping else None
    kept: State = best.state if best else {}
    run, resumed_after = (saved.run, saved.resumed_after_with_this) if saved else (uuid4().hex[:16], [])

    def save(server_round: int, last: bool) -> None:
        if checkpoints.due(server_round, last, stopping):
            about = {_OPTIMIZER: _state_of(optimizer)}
            checkpoints.save(Checkpoint(server_round, _copied(plain), about, run, resumed_after), stopping)

    line = read_metrics(out / "metrics.jsonl")[-1] if after else {}
    before = torch.get_num_threads()
    torch.set_num_threads(config.torch_threads)
    try:
        if not saved:
            save(0, False)
        union = data.train_view()
        for server_round in range(after + 1, config.num_server_rounds + 1):
            if _ends(config, line, stopping):
                break
            result = train(
                model,
                union,
                settings,
                learning_rate=settings.learning_rate.at(server_round),
                stream=functools.partial(_stream, config.seed, server_round),
                optimizer=optimizer,
                task=config.learning_task(),
            )
            line = recorder.write(_report(server_round, result))
            if stopping and stopping.best() == server_round:
                kept = _copied(plain)
            save(server_round, server_round == config.num_server_rounds or _ends(config, line, stopping))
    finally:
        torch.set_num_threads(before)
        recorder.close()
    summary = recorder.finish(kept or to_state(plain.state_dict()), None, resumed_after)
    if _diverged(config, line):
        report = RoundReport(line["round"], line["phase"], diverged=line["diverged"], diverged_at=line[DIVERGED_AT])
        raise DivergedError(divergence(report, TOO_LARGE_STEPS), report.diverged_at)
    return summary


def _report(server_round: int, result: TrainResult) -> RoundReport:
    report = RoundReport(server_round, "centralized")
    report.metrics = {
        TRAIN_LOSS: result.loss,
        EXAMPLES_PROCESSED: result.num_processed,
        DROPPED_BATCHES: result.num_dropped,
    }
    if result.accuracy is not None:
        report.metrics[TRAIN_ACCURACY] = result.accuracy
    return report


def _diverged(config: Config, line: Mapping[str, Any]) -> bool:
    """Return whether the run ends with an error after the round of this line of metrics.jsonl; {} = no round yet."""
    return config.on_divergence == "stop" and DIVERGED_AT in line


def _ends(config: Config, line: Mapping[str, Any], stopping: EarlyStopping | None) -> bool:
    return _diverged(config, line) or (stopping is not None and stopping.stops)


def _state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what the optimizer keeps between steps, by number of the parameter and name; None and numbers as such."""
    kept = optimizer.state_dict()["state"]
    return {
        str(number): {
            name: value.detach().cpu().numpy().copy() if isinstance(value, torch.Tensor) else value
            for name, value in entries.items()
        }
        for number, entries in kept.items()
    }


def _restore(optimizer: torch.optim.Optimizer, kept: Mapping[str, Mapping[str, Any]]) -> None:
    state = {
        int(number): {
            name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
            for name, value in entries.items()
        }
        for number, entries in kept.items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _copied(model: nn.Module) -> State:
    return {name: array.copy() for name, array in to_state(model.state_dict()).items()}


def _stream(seed: int, server_round: int, purpose: str) -> torch.Generator:
    return torch_generator(seed, purpose, server_round, "union")
