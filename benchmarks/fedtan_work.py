"""The work of ``fedtan.py``: ResNet-20, five clients, five steps on batches of 128; in process and as a Flower app."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedbn_flwr import TorchClient, client_app
from fedbn_flwr.data.samples import Samples, Subset
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.models import build_model
from fedbn_flwr.strategies import STRATEGIES, FedAvg
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.training.memory_format import set_memory_format

CLIENTS, STEPS, BATCH = 5, 5, 128
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
TRAINING = LocalTraining(learning_rate=LearningRate(0.1), local_steps=STEPS, batch_size=BATCH)


def make_model() -> nn.Module:
    """Return ResNet-20 for CIFAR-10, as the package's own clients have it."""
    return set_memory_format(build_model("resnet20", num_classes=10, channels=3, size=32))


@cache
def samples(data_dir: str) -> Samples:
    """Return CIFAR-10's training images from torchvision's folder, or random bytes of the same kind where it is ""."""
    if data_dir:
        from torchvision.datasets import CIFAR10

        real = CIFAR10(data_dir, train=True, download=False)
        pixels = torch.from_numpy(np.ascontiguousarray(real.data.transpose(0, 3, 1, 2)))
        return Samples(pixels, torch.tensor(real.targets, dtype=torch.int64))
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (2000 * CLIENTS, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return Samples(pixels, torch.randint(10, (len(pixels),), generator=generator))


def view(partition_id: int, data_dir: str) -> Subset:
    """Return one client's data: every fifth image."""
    every = samples(data_dir)
    return Subset(every, torch.arange(partition_id, len(every), CLIENTS), mean=MEAN, std=STD)


def make_client_app(data_dir: str, amp: bool = False) -> ClientApp:
    """Return the clients' app; with ``amp`` they train under bfloat16 autocast."""
    training = replace(TRAINING, amp=amp)

    def client_fn(context: Context) -> TorchClient:
        torch.set_num_threads(1)  # over a network every client has a process, and they share the cores
        data = view(int(context.node_config["partition-id"]), data_dir)
        return TorchClient(make_model(), data, data, training, context=context)

    return client_app(client_fn)


def make_strategy(name: str, **settings: Any) -> FedAvg:
    """Return a strategy over all clients, without evaluation."""
    return STRATEGIES[name](
        fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS, min_replies=CLIENTS, **settings
    )


def round_seconds(strategy: FedAvg, grid: Grid, rounds: int) -> list[float]:
    """Run rounds and return the seconds each took, without the first, which also gets to know the nodes.

    With ``rounds`` = 0 the first alone is run and counted.

    Raises:
        RuntimeError: a client was refused: the figures would not be those of the whole work.
    """
    times: list[float] = []

    def note(server_round: int, arrays: ArrayRecord) -> None:
        times.append(time.perf_counter())

    strategy.start(
        grid=grid, initial_arrays=to_record(make_model().state_dict()), num_rounds=rounds + 1, evaluate_fn=note
    )
    if refused := [reason for report in strategy.reports for reason in report.rejected.values()]:
        raise RuntimeError(f"a client was refused: {refused[0]}")
    return [after - before for before, after in pairwise(times[1:] if rounds else times)]


def bare_steps(count: int, threads: int, data_dir: str = "") -> int:
    """Do ``count`` steps of plain torch, as a client does them; return ``count``."""
    torch.set_num_threads(threads)
    model, data = make_model(), view(0, data_dir)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        inputs, targets = data.batch(torch.randint(len(data), (BATCH,), generator=generator))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return count


def make_server_app() -> ServerApp:
    """Return a ServerApp that times a strategy.

    Run config: ``strategy``, ``exchange``, ``bind`` and ``tls-dir`` of the channel, ``rounds``, ``times``.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = context.run_config
        settings = {}
        if config["exchange"]:
            names = {"fedtan_transport": "exchange", "fedtan_bind": "bind", "fedtan_tls_dir": "tls-dir"}
            settings = {field: str(config[key]) for field, key in names.items()}
        strategy = make_strategy(str(config["strategy"]), **settings)
        seconds: Sequence[float] = round_seconds(strategy, grid, int(config["rounds"]))
        Path(str(config["times"])).write_text(json.dumps(list(seconds)))

    return app
