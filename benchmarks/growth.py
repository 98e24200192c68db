"""How time and memory grow: clients, clients a round, layers, parameters, rounds, size of a message.

    python benchmarks/growth.py
    python benchmarks/growth.py --only clients --turns 1

The in-process engine, clients one after the other in the command's own process, FedBN, one torch thread. One number
grows and the others stay: 100 clients, 10 a round, 4 layers of width 32 with BatchNorm, 4 steps on batches of 16, 3
rounds after the first. Images are random, 8 x 8, and few: 32 for each client, all the same ones. Each point runs in a
fresh process, all points in turns; shown are medians. Memory is the largest resident set of that process beyond what it
needed after its imports. Below each table stands a straight line, time = a + b n, fitted to the relative errors, with
the largest of them; a line that misses a point by more than 25 % is none, and the reason stands in its place.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import numpy as np
import torch
import typer
from flwr.app import Context
from measure import ROOT, facts, number, table, write_block
from peers.flower_rounds import timed
from peers.work import Clock, Setting
from torch import nn

from fedbn_flwr import InProcessGrid, TorchClient, client_app
from fedbn_flwr.lab.data import Samples, Subset
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.strategies import FedBN
from fedbn_flwr.training import LearningRate, LocalTraining

PIXELS, IMAGES = 64, 32
STRAIGHT = 0.25
"""The largest relative error of a straight line that is called one."""


@dataclass(frozen=True)
class Point:
    """One run; ``buffer`` is a float32 entry of the state that no layer uses: it only travels."""

    clients: int = 100
    a_round: int = 10
    layers: int = 4
    width: int = 32
    rounds: int = 3
    buffer: int = 0


@dataclass(frozen=True)
class Column:
    """What grows in a table.

    Attributes:
        title: the number in words.
        points: the runs.
        count: the name of the number's field in ``Point``, or of a figure of the run.
        time: the figure that is fitted: ``start`` (from nothing to the end of round 1), ``round`` or ``total``.
        bent: why the time is no straight line, where it is none.
    """

    title: str
    points: tuple[Point, ...]
    count: str
    time: str = "round"
    bent: str = ""


def points(name: str, *values: int, **fixed: int) -> tuple[Point, ...]:
    """Return points that differ in one number."""
    return tuple(replace(Point(), **fixed, **{name: value}) for value in values)


COLUMNS = {
    "clients": Column(
        "clients, 10 of them a round",
        points("clients", 10, 100, 1000, 10_000, 100_000),
        "clients",
        "start",
        bent="up to 10,000 clients most of this time is the first round, which their number changes little",
    ),
    "a-round": Column("clients a round, of 300", points("a_round", 10, 30, 100, 300, clients=300), "a_round"),
    "layers": Column("layers, each with BatchNorm", points("layers", 2, 8, 32, 128), "layers"),
    "parameters": Column(
        "parameters of 4 layers",
        points("width", 32, 128, 512),
        "parameters",
        bent="a step costs a fixed time for each layer and, with larger matrices, more operations a second",
    ),
    "rounds": Column("rounds", points("rounds", 10, 100, 300), "rounds", "total"),
    "message": Column(
        "bytes of a message",
        points("buffer", 0, 100_000, 1_000_000, 3_000_000),
        "bytes",
        bent="messages that fit into the caches cost less a byte",
    ),
}


class Block(nn.Module):
    """One layer with BatchNorm and a way around it, with which a deep net trains without blowing up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the input and the layer's output added up."""
        return values + self.layer(values)  # type: ignore[no-any-return]


class Net(nn.Module):
    """Blocks between two linear layers, and a buffer."""

    def __init__(self, point: Point) -> None:
        super().__init__()
        blocks = [Block(point.width) for _ in range(point.layers)]
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, point.width), *blocks, nn.Linear(point.width, 10))
        self.register_buffer("ballast", torch.zeros(point.buffer))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.layers(images)  # type: ignore[no-any-return]


def run(point: Point) -> dict[str, float]:
    """Return the figures of one run in this process."""
    torch.manual_seed(0)
    pixels = torch.randint(256, (IMAGES, 1, 8, 8), dtype=torch.uint8)
    images = Subset(Samples(pixels, torch.randint(10, (IMAGES,))), None, mean=(0.5,), std=(0.3,))
    settings = LocalTraining(learning_rate=LearningRate(0.001), batch_size=16, local_steps=4)
    model = Net(point)
    state = to_record(model.state_dict())
    clock = Clock(point.rounds)
    before = highest_memory()
    begun = time.perf_counter()

    def build() -> nn.Module:
        return Net(point)

    def client_fn(context: Context) -> TorchClient:
        return TorchClient(build, images, images, settings, context=context)

    setting = Setting("", "", "", point.clients, IMAGES, 16, point.a_round)
    strategy = timed(FedBN, clock, setting)(
        fraction_train=point.a_round / point.clients,
        fraction_evaluate=0.0,
        min_train_nodes=point.a_round,
        min_available_nodes=point.clients,
    )
    with InProcessGrid(client_app(client_fn, num_examples=lambda context: IMAGES), point.clients) as grid:
        strategy.start(grid, state, num_rounds=point.rounds + 1)
    total = time.perf_counter() - begun
    return {
        "start": total - sum(clock.seconds),
        "round": statistics.median(clock.seconds),
        "total": total,
        "memory": (highest_memory() - before) / 1e6,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": sum(entry.nbytes for entry in model.state_dict().values()),
    }


def highest_memory() -> int:
    """Return the largest resident set of this process so far, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def in_fresh_process(point: Point) -> dict[str, float]:
    """Return the figures of one run in a process of its own.

    Raises:
        RuntimeError: it failed; with the last lines of its log.
    """
    command = [sys.executable, __file__, "--point", json.dumps(vars(point))]
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{point} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def straight_line(counts: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return a and b of time = a + b n, by least squares of the relative errors, and the largest relative error."""
    n, t = np.array(counts, dtype=float), np.array(seconds)
    (a, b), *_ = np.linalg.lstsq(np.stack([np.ones_like(n), n], 1) / t[:, None], np.ones_like(t), rcond=None)
    return float(a), float(b), float(np.abs((a + b * n) / t - 1).max())


def line(column: Column, counts: Sequence[float], seconds: Sequence[float]) -> str:
    """Return the sentence below a table."""
    a, b, worst = straight_line(counts, seconds)
    what = {"start": "seconds to the end of round 1", "round": "seconds a later round", "total": "seconds in all"}
    fit = f"{what[column.time]} = {a:.3g} + {b:.3g} n, largest error {worst:.0%}"
    if worst <= STRAIGHT:
        return f"Straight line: {fit}."
    return f"No straight line (best: {fit}): {column.bent or 'not explained yet'}."


def markdown(column: Column, found: Sequence[Sequence[dict[str, float]]]) -> str:
    """Return a column's table and its line."""
    rows, counts, seconds = [], [], []
    for point, results in zip(column.points, found, strict=True):
        middle = {key: statistics.median(result[key] for result in results) for key in results[0]}
        count = middle.get(column.count, getattr(point, column.count, 0))
        counts.append(count)
        seconds.append(middle[column.time])
        cells = [number(middle[key]) for key in ("start", "round", "total", "memory")]
        rows.append([f"{count:,.0f}", *cells])
    head = [column.title, "to the end of round 1, s", "a later round, s", "in all, s", "memory, MB"]
    return f"{table(head, rows)}\n\n{line(column, counts, seconds)}"


def main(
    turns: Annotated[int, typer.Option(min=1, help="turns; each runs every point once")] = 2,
    only: Annotated[list[str] | None, typer.Option(help=f"tables: {', '.join(COLUMNS)}; default: all")] = None,
    out: Annotated[Path, typer.Option(help="where the figures go, as JSON")] = Path("runs/benchmark-growth.json"),
    write: Annotated[Path | None, typer.Option(help="a page with the block 'growth'")] = None,
    point: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure how time and memory of the in-process engine grow."""
    if point:
        logging.getLogger("flwr").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        print(json.dumps(run(Point(**json.loads(point)))))
        return
    names = only or list(COLUMNS)
    if unknown := [name for name in names if name not in COLUMNS]:
        raise typer.BadParameter(f"unknown table {unknown[0]!r}; known: {', '.join(COLUMNS)}")
    wanted = [(name, index) for name in names for index in range(len(COLUMNS[name].points))]
    found: dict[str, Any] = {name: [[] for _ in COLUMNS[name].points] for name in names}
    for turn in range(turns):
        for name, index in wanted[:: 1 if turn % 2 == 0 else -1]:
            one = COLUMNS[name].points[index]
            found[name][index].append(in_fresh_process(one))
            print(f"turn {turn + 1} of {turns}, {name}: {found[name][index][-1]}", file=sys.stderr, flush=True)
    tables = [markdown(COLUMNS[name], found[name]) for name in names]
    text = "\n\n".join([*tables, f"{facts()} {turns} turn{'s' * (turns > 1)}."])
    print(text)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    partial.write_text(json.dumps({"facts": facts(), "figures": found}, indent=2) + "\n")
    os.replace(partial, out)
    if write is not None:
        write_block(write, "growth", text)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
