"""What a method, and a norm, cost beside FedAvg with BatchNorm: CPU seconds of a round,
as ratios on the same steps.

    python benchmarks/methods.py --write benchmarks/results.md    # some eight minutes a turn on one core

ResNet-20 on random images of CIFAR-10's size: five clients, each an epoch of 320 images
in batches of 32, a thread. The methods take turns, and each round of a turn counts but
the first.
"""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import torch
import typer
from fedtan_work import CLIENTS, MEAN, STD, make_model, make_strategy, samples
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp
from measure import facts, in_turns, number, table, write_block
from torch import nn

from fedbn_flwr import InProcessGrid, TorchClient, client_app
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.norms import replace_norm
from fedbn_flwr.strategies import STRATEGIES
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.training.batches import set_memory_format

IMAGES, BATCH, ROUNDS = 320, 32, 2
TRAINING = LocalTraining(
    learning_rate=LearningRate(0.01), local_steps=IMAGES // BATCH, batch_size=BATCH
)
Way = tuple[str, str, dict[str, Any]]
"""Strategy, norm and settings."""
WAYS: dict[str, Way] = {name: (name, "batch", {}) for name in STRATEGIES}
WAYS["fedwon"] = ("fedwon", "wsconv", {})
# synchronise in all rounds of this run
WAYS["fedtan2"] = ("fedtan2", "batch", {"fedtan_rounds": ROUNDS + 1})
WAYS["fedavg recalibrate"] = ("fedavg", "batch", {"recalibrate": True})
WAYS["fbn fbn-measure=pass"] = ("fbn", "batch", {"fbn_measure": "pass"})
WAYS |= {
    f"fedavg norm={norm}": ("fedavg", norm, {})
    for norm in ("group", "group+ws", "layer", "instance")
}


def model_with(norm: str) -> nn.Module:
    """Return ResNet-20 with another norm."""
    return set_memory_format(replace_norm(make_model(), norm)[0])


def clients(norm: str) -> ClientApp:
    """Return the clients' app."""

    def client_fn(context: Context) -> TorchClient:
        first = IMAGES * int(context.node_config["partition-id"])
        data = Subset(
            samples(""), torch.arange(first, first + IMAGES), mean=MEAN, std=STD
        )
        return TorchClient(
            partial(model_with, norm), data, data, TRAINING, context=context
        )

    return client_app(client_fn)


def seconds(name: str, norm: str, settings: dict[str, Any]) -> list[float]:
    """Return the CPU seconds of each round after the first."""
    strategy, times = make_strategy(name, **settings), list[float]()

    def note(server_round: int, arrays: ArrayRecord) -> None:
        times.append(time.process_time())

    with InProcessGrid(clients(norm), CLIENTS) as grid:
        arrays = to_record(model_with(norm).state_dict())
        strategy.start(
            grid=grid, initial_arrays=arrays, num_rounds=ROUNDS + 1, evaluate_fn=note
        )
    if refused := [
        reason for report in strategy.reports for reason in report.rejected.values()
    ]:
        raise RuntimeError(f"{name}: a client was refused: {refused[0]}")
    return [after - before for before, after in pairwise(times[1:])]


def main(
    turns: Annotated[int, typer.Option(help="Turns of each method.")] = 5,
    only: Annotated[
        str, typer.Option(help="Comma list of methods; FedAvg always runs.")
    ] = "",
    write: Annotated[
        Path | None, typer.Option(help="Page with a place for the table.")
    ] = None,
) -> None:
    """Time the methods in turn."""
    torch.set_num_threads(1)
    if unknown := {*filter(None, only.split(","))} - {*WAYS}:
        raise typer.BadParameter(
            f"unknown: {', '.join(sorted(unknown))}. Allowed: {', '.join(WAYS)}."
        )
    chosen = {
        name: way
        for name, way in WAYS.items()
        if not only or name in ("fedavg", *only.split(","))
    }
    found = in_turns(
        {name: partial(seconds, *way) for name, way in chosen.items()}, turns
    )
    medians = {name: statistics.median(values) for name, values in found.items()}
    rows = [
        [name, number(value), number(value / medians["fedavg"])]
        for name, value in sorted(medians.items(), key=lambda item: item[1])
    ]
    text = table(["method", "CPU seconds a round", "/ fedavg"], rows)
    work = (
        f"{CLIENTS} clients x {IMAGES} images, batches of {BATCH}; medians of"
        f" {turns * ROUNDS} rounds."
    )
    text += f"\n\n{work} {facts()}"
    write_block(write, "methods", text) if write else print(text)


if __name__ == "__main__":
    typer.run(main)
