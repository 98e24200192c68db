"""The centralized reference, a plain torch loop over all clients' data."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import nn

from fedbn_flwr.batchnorm.array_types import State
from fedbn_flwr.lab.config import Config, data_of, method_of
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.lab.early_stopping import EarlyStopping
from fedbn_flwr.lab.output.checkpoint import Checkpoint, StartingPoint
from fedbn_flwr.lab.output.folder import RunFolder, lock_folder
from fedbn_flwr.lab.output.result_writer import OnRound, ResultWriter
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.lab.runs.check_start import CheckedConfig
from fedbn_flwr.lab.runs.folder_listener import divergence_of, ends_diverged
from fedbn_flwr.lab.runs.serve import beginning, report_data, tests_of_clients
from fedbn_flwr.lab.setup import local_training, on_device
from fedbn_flwr.messages.protocol import (
    DROPPED_BATCHES,
    EXAMPLES_PROCESSED,
    TRAIN_ACCURACY,
    TRAIN_LOSS,
)
from fedbn_flwr.messages.records import tensors, to_state
from fedbn_flwr.server.methods.together import TOO_LARGE_STEPS
from fedbn_flwr.server.runs.failures import losses_not_finite
from fedbn_flwr.server.runs.round_outcome import RoundOutcome
from fedbn_flwr.training import make_optimizer, train
from fedbn_flwr.training.loop import TrainResult
from fedbn_flwr.training.model_state import load_state, unwrap
from fedbn_flwr.training.randomness import torch_generator

logger = logging.getLogger("flwr")

_OPTIMIZER = "optimizer"  # key in a checkpoint's ``strategy``


def centralized(
    checked: CheckedConfig, out: Path, on_round: OnRound | None = None
) -> dict[str, Any]:
    """Run the reference over the union of the clients' data, and write its folder.

    A "round" is E steps or epochs. All rounds use one optimizer. Otherwise the training
    is the same as a client's training. ``serve`` describes arguments and errors.
    """
    for line in checked.warnings:
        logger.warning("%s", line)
    config = reference_config(checked.config)
    with lock_folder(out):
        # Load the data, and the model from its beginning or from the last checkpoint.
        data = partitioned_data(config, count_clients(config))
        model = on_device(checked.model, config)
        start, _ = beginning(config, model, out)
        optimizer = make_optimizer(model, local_training(config))
        if start.saved:
            _resume(start, start.saved, model, optimizer)

        with RunFolder(out, config, start.after) as folder:
            report_data(folder, config, data)
            writer = ResultWriter(folder, config, model, data, None, on_round)
            tests = tests_of_clients(config, data)
            reference = _Reference(config, model, optimizer, writer, start, tests)

            # Do the rounds with as many threads as a client has.
            threads = torch.get_num_threads()
            torch.set_num_threads(config.torch_threads)
            try:
                last = reference.train(data.train_view())
            except (KeyboardInterrupt, SystemExit):
                reference.on_signal()
                raise
            finally:
                torch.set_num_threads(threads)
                writer.close()

            summary = writer.finish(reference.result(), None, reference.resumed_after)
            if ends_diverged(config, last):
                raise divergence_of(last, TOO_LARGE_STEPS)
            return summary


def reference_config(config: Config) -> Config:
    """Return the config without tests that only federated methods have.

    If the config has only such tests, the returned config has the test "global".
    """
    tests = []
    for name in method_of(config).tests:
        if name.startswith(("global", "personal")):
            tests.append(name)
    return config.model_copy(update={"eval_on": ",".join(tests) or "global"})


def _resume(
    start: StartingPoint,
    saved: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Restore the saved model and optimizer, so that the momentum continues."""
    logger.info(
        "resumed after round %d from %s", saved.server_round, start.checkpoints.folder
    )
    load_state(model, tensors(saved.state))
    _restore(optimizer, saved.strategy[_OPTIMIZER])
    start.checkpoints.set_aside_after(saved.server_round)


class _Reference:
    """The rounds of the reference.

    The object has the model, the optimizer, the checkpoints of both, and the state
    after the best round.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        writer: ResultWriter,
        start: StartingPoint,
        tests: Sequence[str],
    ) -> None:
        self._config = config
        self._model = model
        self._optimizer = optimizer
        self._writer = writer
        self._stopping = writer.stopping
        self._start = start
        self._tests = tests
        # a copy of the state after the last complete round, because training changes
        # the state itself
        self._whole: Checkpoint | None = None

        # the state of a resumed run
        self._best: State = {}
        self._run = uuid4().hex[:16]
        self.resumed_after: list[int] = []
        saved = start.saved
        if saved:
            self._run = saved.run
            self.resumed_after = [*saved.resumed_after, saved.server_round]
        if saved and self._stopping:
            best = start.checkpoints.best(self._stopping)
            self._best = best.state if best else {}

    def train(self, union: Subset) -> Mapping[str, Any]:
        """Do the remaining rounds, and return the line of the run's last round.

        Args:
            union: the training data of all clients.
        """
        config = self._config
        line: Mapping[str, Any] = {}
        if self._start.after:
            line = self._writer.lines()[-1]
        settings, task = local_training(config), data_of(config).test_task
        # Save the initial state as well, so that a run that is killed in round 1 can be
        # resumed.
        if not self._start.saved:
            self._save(0, False)
        first = (self._start.after or 0) + 1
        for server_round in range(first, config.num_server_rounds + 1):
            if _ends(config, line, self._stopping):
                break
            result = train(
                self._model,
                union,
                settings,
                learning_rate=settings.learning_rate.at(server_round),
                stream=functools.partial(_stream, config.seed, server_round),
                optimizer=self._optimizer,
                task=task,
            )
            report = _report(server_round, result, self._writer.test(server_round))
            report.evaluations = self._writer.test_at_clients(server_round, self._tests)
            line = self._writer.write(report)
            # Ask early stopping only here, because ``write`` passes it the validation
            # score of the round.
            if self._stopping and self._stopping.best() == server_round:
                self._best = self._state()
            last = server_round == config.num_server_rounds
            self._save(server_round, last or _ends(config, line, self._stopping))
        return line

    def result(self) -> State:
        """Return the state of the best round (early stopping) or the last round."""
        return self._best or self._state()

    def on_signal(self) -> None:
        """Save the last complete round, if a signal ends the run within a round."""
        checkpoints = self._start.checkpoints
        if self._whole and self._whole.server_round not in checkpoints.rounds:
            checkpoints.save(self._whole, self._stopping)

    def _save(self, server_round: int, last: bool) -> None:
        """Copy the state after a round for ``on_signal``, and save it if it is due."""
        if not self._config.checkpoint_every:
            return
        checkpoints = self._start.checkpoints
        about = {_OPTIMIZER: _state_of(self._optimizer)}
        self._whole = Checkpoint(
            server_round, self._state(), about, self._run, self.resumed_after
        )
        if checkpoints.due(server_round, last, self._stopping):
            checkpoints.save(self._whole, self._stopping)

    def _state(self) -> State:
        state = to_state(unwrap(self._model).state_dict())
        return {name: array.copy() for name, array in state.items()}


def _report(
    server_round: int, result: TrainResult, tested: Mapping[str, Any]
) -> RoundOutcome:
    """Return the report of a round, and log non-finite losses."""
    report = RoundOutcome(server_round, "centralized")
    report.metrics = {
        TRAIN_LOSS: result.loss,
        EXAMPLES_PROCESSED: result.num_processed,
        DROPPED_BATCHES: result.num_dropped,
    }
    if result.accuracy is not None:
        report.metrics[TRAIN_ACCURACY] = result.accuracy
    losses = losses_not_finite({"": {**report.metrics, **tested}})
    if losses:
        report.diverged, report.diverged_at = losses, server_round
        logger.error("round %d diverged: %s", server_round, "; ".join(losses))
    return report


def _ends(
    config: Config, line: Mapping[str, Any], stopping: EarlyStopping | None
) -> bool:
    if stopping and stopping.stops:
        return True
    return ends_diverged(config, line)


def _state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a copy of the optimizer's state, such as momentum, by parameter number.

    Tensors become arrays, because a checkpoint stores arrays. Other values stay.
    """
    state: dict[str, Any] = {}
    for number, entries in optimizer.state_dict()["state"].items():
        kept = dict(entries)
        for name, value in entries.items():
            if torch.is_tensor(value):
                kept[name] = value.cpu().numpy().copy()
        state[str(number)] = kept
    return state


def _restore(
    optimizer: torch.optim.Optimizer, kept: Mapping[str, Mapping[str, Any]]
) -> None:
    """Give a new optimizer the state that ``_state_of`` returned."""
    state = {}
    for number, entries in kept.items():
        restored = dict(entries)
        for name, value in entries.items():
            if isinstance(value, np.ndarray):
                restored[name] = torch.from_numpy(value.copy())
        state[int(number)] = restored
    # Take the parameter groups from the config, because a resume cannot change them.
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _stream(seed: int, server_round: int, purpose: str) -> torch.Generator:
    return torch_generator(seed, purpose, server_round, "union")
