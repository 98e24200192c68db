"""The package's own run of a case, and its result."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from torch import Tensor
from torch.utils.data import Dataset

from fedbn_flwr import client_app, to_legacy
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client import TorchClient
from fedbn_flwr.client.kept import Folder, Memory
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import NothingTrainedError
from fedbn_flwr.messages.protocol import Continuity
from fedbn_flwr.messages.records import from_record, tensors, to_record
from fedbn_flwr.norms import replace_norm
from fedbn_flwr.strategies import STRATEGIES, FedAvg, Strategy, combined
from fedbn_flwr.training import CLASSIFICATION, LearningRate, LocalTraining, Task
from tests.reference import command, loops
from tests.reference import methods as of
from tests.reference.federation import RATE, UNMEASURED
from tests.reference.networks import network
from tests.support import user_loops
from tests.support.federation import (
    ALONE,
    RecordingBarrierGrid,
    RecordingGrid,
    newest,
    run_rounds,
    torch_clients,
)
from tests.support.points import Points

_ADAM = {"eta": of.ETA, "tau": of.TAU, "beta_1": of.BETA_1, "beta_2": of.BETA_2}
SETTINGS = {
    "fedprox": {"proximal_mu": of.MU},
    "ditto": {"proximal_mu": of.MU},
    "scaffold": {"server_learning_rate": of.SERVER_RATE},
    "fixbn": {"freeze_at": of.T_STAR},
    "hbn": {"statistics_momentum": of.SHARE},
    "fedtan2": {"fedtan_rounds": of.T_STAR},
    "fedavgm": {
        "server_learning_rate": of.SERVER_RATE,
        "server_momentum": of.MOMENTUM,
    },
    "fedadam": _ADAM,
    "fedyogi": _ADAM,
    "fedadagrad": {"eta": of.ETA, "tau": of.TAU},
    "fedbs": {
        "fedbs_eps": of.EPS,
        "fedbs_rounds": of.PATIENCE,
        "proximal_mu": of.MU,
    },
}


@dataclass
class Result:
    """The result of a run."""

    # the tested global model after each round with a test
    history: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    own: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    kept: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    tests: list[Mapping[str, Mapping[str, float]]] = field(default_factory=list)
    used: bool = False  # whether a round was used
    way: str = ""
    # each client's own model in the run's folder
    models: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)


def data_of(case: Any, moved: float = 0.0) -> list[tuple[Tensor, Tensor]]:
    """Return the clients' data, with each input moved by about a share of itself."""
    shape, dtype = network(case.model).shape, getattr(torch, case.dtype)
    data = []
    for i, size in enumerate(case.sizes):
        g = torch.Generator().manual_seed(i)
        x = torch.randn(size, *shape, generator=g, dtype=torch.float64)
        x = x * (1 + 0.3 * i) + 0.5 * i
        # BatchNorm would hide a move of all numbers by one factor.
        noise = torch.Generator().manual_seed(1000 + i)
        x *= 1 + moved * torch.randn(x.shape, generator=noise, dtype=torch.float64)
        if case.way == "command":  # its inputs are float32
            x = x.float()
        data.append((x.to(dtype), torch.randint(3, (size,), generator=g)))
    return data


def model_of(case: Any, dtype: torch.dtype):
    """Return the model that the package trains."""
    if case.model == "wsconv":
        return replace_norm(network("convolved", dtype), "wsconv")[0]
    return network(case.model, dtype, case.optimizer != "sgd")


class Faulty(TorchClient):
    """A TorchClient that raises, or sends NaN, in the rounds of the case."""

    faults: Mapping[tuple[int, int], str] = {}

    def fault(self, config: Any) -> str:
        place = int(config["server-round"]), self.partition_id or 0
        return self.faults.get(place, "")

    def statistics(self, parameters: Any, config: Any):
        if self.fault(config) == UNMEASURED:
            raise RuntimeError("as the case asks")
        return super().statistics(parameters, config)

    def fit(self, parameters: Any, config: Any):
        fault = self.fault(config)
        if fault == "raise":
            raise RuntimeError("as the case asks")
        arrays, count, metrics = super().fit(parameters, config)
        # An exchange of a synchronised step has no loss.
        if fault == "nan" and "train-loss" in metrics:
            arrays = [a * np.nan if a.dtype.kind == "f" else a for a in arrays]
        return arrays, count, metrics


def faulty(case: Any) -> type[TorchClient]:
    """Return the class of the clients of a case."""
    faults = {(r, i): kind for r, i, kind in case.faults}
    return type("Faulty", (Faulty,), {"faults": faults}) if faults else TorchClient


def losing(faults: Mapping[tuple[int, int], str]):
    """Return a mod that loses replies after the training, as the case asks."""

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        if not message.metadata.message_type.startswith("train"):
            return reply
        numbers = [
            record.get("server-round")
            for record in message.content.config_records.values()
        ]
        place = numbers[0], context.node_config["partition-id"]
        fault = faults.get(place)
        if fault == "fails":
            raise RuntimeError("as the case asks")
        if fault == "lost":
            return Message(Error(ErrorCode.UNKNOWN, "lost"), reply_to=message)
        return reply

    return mod


class Rows(Dataset):
    """Examples that are read from an open file of all clients."""

    def __init__(self, file: Any, data: Points) -> None:
        self.file, self.first, self.targets = file, file.tell(), data.targets
        self.like = data.inputs[0].numpy()
        file.write(data.inputs.numpy().tobytes())

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.file.seek(self.first + index * self.like.nbytes)
        time.sleep(0)  # let another process move the position, if it has the same
        read = self.file.read(self.like.nbytes)
        row = np.frombuffer(bytearray(read), self.like.dtype)
        return torch.from_numpy(row.reshape(self.like.shape)), self.targets[index]


def in_one_file(datasets: Sequence[Points]) -> list[Rows]:
    file = TemporaryFile(buffering=0)  # noqa: SIM115
    return [Rows(file, data) for data in datasets]


def app_of(case: Any, make: Any, datasets: Any, task: Task = CLASSIFICATION):
    """Return an app of TorchClients or of a user's loop behind the mod."""
    faults = {(r, i): kind for r, i, kind in case.faults}
    if case.in_loop:
        return loops.app(
            case, make, datasets, training_of(case), faults, losing(faults)
        )
    if case.data == "one-file":
        datasets = in_one_file(datasets)
    # The hook of a weight norm refers to its layer, so the client gets the function.
    give = (lambda: make) if case.built or case.model == "parametrized" else make
    options = {"client": faulty(case), "seed": case.client_seed, "task": task}
    clients = torch_clients(give, datasets, training_of(case), **options)
    if case.way == "legacy":
        return ClientApp(
            client_fn=lambda context: clients(context).to_client(),
            mods=[losing(faults)],
        )
    return client_app(clients, mods=[losing(faults)])


def settings_of(case: Any) -> dict:
    """Return the settings of the case's methods."""
    settings = {}
    for name in case.methods:
        settings |= SETTINGS.get(name, {})
    if case.has("fedrep"):
        settings["head_steps"] = case.head_steps
    if case.has("hbn"):
        settings["statistics_warm_up"] = case.statistics_warm_up
    if case.has("fixbn"):
        settings["freeze_affine"] = case.freeze_affine
        if case.freeze_auto:
            settings |= {"freeze_at": "auto", "freeze_window": of.WINDOW}
            settings["freeze_tau"] = of.STEADY
    if case.synchronised:
        settings["fedtan_exchanges"] = case.exchanges
        if case.transport == "channel":
            settings["fedtan_transport"] = "channel"
    if case.layers:
        layers = split_state(network(case.model)).layers
        settings["layers"] = layers[0].path if layers else "norm"
    return settings


def _to_named_function(made: Any) -> type[Strategy]:
    """Return a user's class that sends training to ``@app.train("local")``."""

    class Named(Strategy):
        method = getattr(made, "method", made)

        def configure_train(self, *args: Any) -> list:
            messages = list(super().configure_train(*args))
            for message in messages:
                message.metadata.message_type = "train.local"
            return messages

    return Named


COMMON = ("momentum_scope", "variance", "recalibrate", "eval_on", "eval_every")
COMMON += ("fine_tune", "personal", "min_replies", "seed")
"""The settings of every strategy that a case names in the same way."""


def strategy_of(case: Any):
    """Return the strategy of a case."""
    settings = settings_of(case)
    if case.synchronised:
        settings["fedtan_timeout"] = 30.0
    common = {name: getattr(case, name) for name in COMMON}
    common["train_only"] = case.trains
    if case.agc or case.has("fedwon"):
        common["agc"] = case.agc
    kinds = [STRATEGIES[name] for name in case.methods] or [FedAvg]
    made = combined(*kinds)
    if case.way == "named":
        made = _to_named_function(made)
    return made(
        fraction_train=case.fraction,
        **ALONE,
        **settings,
        **{name: value for name, value in common.items() if value != ""},
    )


def training_of(case: Any) -> LocalTraining:
    """Return the settings of local training."""
    decay = ()
    if case.decay:
        decay = (1 if case.decay == "round" else "freeze",)
    training = LocalTraining(
        learning_rate=LearningRate(RATE, decay, (0.5,) * len(decay)),
        batch_size=case.batch_size,
        local_steps=case.steps,
        local_epochs=0 if case.steps else 1,
        sampling=case.sampling,
    )
    if case.way == "own-loop":
        return replace(training, loop=user_loops.loop_of_steps)
    return replace(
        training,
        optimizer=case.optimizer,
        sgd_momentum=case.momentum,
        weight_decay=case.weight_decay,
    )


def run(case: Any, moved: float = 0.0, task: Task = CLASSIFICATION) -> Result:
    """Run the case with the package."""
    if case.way == "command":
        return command.run(case, data_of(case, moved), Result(way=case.way))
    dtype = getattr(torch, case.dtype)
    datasets = [Points(x, y) for x, y in data_of(case, moved)]
    make = functools.partial(model_of, case, dtype)
    app = app_of(case, make, datasets, task)
    result = Result(way=case.way)
    hidden = set()
    grid_of = RecordingBarrierGrid if case.transport == "barrier" else RecordingGrid
    workers = 2 if case.engine == "workers" else 0
    # The clients of a round wait for one another in the channel.
    if workers and case.transport == "channel":
        workers = len(datasets)
    # Clients that meet in a channel are at work at the same time.
    threads = len(datasets) if case.transport == "channel" else 1
    with TemporaryDirectory() as folder, ExitStack() as grids:
        settings = {"state-dir": folder} if case.folder else {}

        def fresh():
            """Return the way to start a run on nodes with empty memories."""
            inner = grids.enter_context(
                InProcessGrid(
                    app,
                    len(datasets),
                    workers=workers,
                    threads=threads,
                    node_configs=[settings] * len(datasets),
                )
            )
            grid = grid_of(inner, lambda: hidden)
            return functools.partial(_start, case, grid, make(), hidden), inner

        start, inner = fresh()
        if case.again:  # the clients have the state of an earlier run
            start("earlier", Result(), 0)
        stops = case.resumed_after if case.again == "resume" else 0
        saved = start("run", result, stops)
        if saved is not None:
            if case.folder:  # the nodes are killed as well
                start, inner = fresh()
            start("run", result, 0, saved)
        for i in range(len(case.sizes)):
            store = Folder(Path(folder), "run", i) if case.folder else None
            kept = newest(store or Memory(inner.context(i)))
            result.own[i] = tensors(kept["fedbn-flwr.local"])
            result.kept[i] = tensors(kept["fedbn-flwr.rules"])
    return result


def _start(
    case: Any,
    grid: Any,
    model: Any,
    hidden: set[int],
    name: str,
    result: Result,
    stops: int,
    saved: tuple | None = None,
) -> tuple | None:
    """Run the rounds, and return model and state if they end at ``stops``.

    With folders, the run goes on after this checkpoint until it is killed a round
    later.
    """
    strategy = strategy_of(case)
    checkpoint = []
    if case.folder:
        strategy.continuity = Continuity(name)

    def save(server_round: int, *_: Any) -> None:
        if server_round == stops:
            checkpoint.append((strategy.run.arrays, strategy.state_dict()))
            if case.folder:
                strategy.continuity = Continuity(name, (server_round,))

    strategy.on_round_end = save
    split = strategy.params.layers, strategy.params.personal
    strategy.parts = split_state(model, *split)
    arrays, after = to_record(model.state_dict()), 0
    if saved is not None:
        after = len(result.tests)
        arrays, state = saved
        strategy.load_state_dict(state, after)

    def test(server_round: int, tested: Any) -> None:
        if case.tests_after(server_round):
            result.history[server_round] = tensors(from_record(tested))
        strategy.stopped = bool(stops) and server_round == stops + case.folder
        hidden.clear()
        hidden.update(i for r, i in case.hidden if r == server_round + 1)

    # Round 0 is not tested in a resumed run.
    hidden.clear()
    hidden.update(i for r, i in case.hidden if r == after + 1)
    try:
        if case.way == "legacy":
            _legacy_loop(case, strategy, grid, arrays, result)
        else:
            strategy.start(grid, arrays, case.rounds, timeout=60, evaluate_fn=test)
        result.used = True
    except NothingTrainedError:
        result.used = False
    reports = strategy.reports[:stops] if stops else strategy.reports
    for report in reports:
        result.tests.append(dict(report.evaluations))
    # Without a state folder, all kept state is in memory.
    kept = strategy.run.kept
    assert kept.volatile == (set() if case.folder else kept.hashes.keys())
    return checkpoint[0] if stops else None


def _legacy_loop(
    case: Any, strategy: Any, grid: Any, arrays: Any, result: Result
) -> None:
    """Run the rounds in Flower's legacy loop."""

    def test(server_round: int, tested: Any, config: Any) -> None:
        if case.tests_after(server_round):
            state = dict(zip(arrays, tested, strict=True))
            result.history[server_round] = tensors(state)

    legacy = to_legacy(
        strategy, arrays, num_rounds=case.rounds, timeout=60, evaluate_fn=test
    )
    run_rounds(legacy, grid, case.rounds)
