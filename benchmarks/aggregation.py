"""What it costs to average the replies of a round, beside Flower's own function and
beside bare sums in torch.

    python benchmarks/aggregation.py                              # 20 replies of torchvision's resnet18
    python benchmarks/aggregation.py --model mlp --repeats 51     # small ones: what a reply costs at least
    python benchmarks/aggregation.py --model cnn --replies 50

Ours is all that the server does: read the arrays, check names, shapes, dtypes, finite
values and variances, add up in float64, and write the mean. ``aggregate_arrayrecords``
adds up in float32 and checks nothing. Torch's sums stand for what the memory allows:
views of the arrays, nothing read, checked or written. All take turns, on one thread;
medians are shown. Memory is the peak of the process above the replies, in one further
turn.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for torch and NumPy's OpenBLAS
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import torch
import torchvision.models as tv
import typer
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from measure import facts, table, write_block
from torch import nn

from fedbn_flwr.batchnorm.check_state import check_state
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.messages.records import tensors, to_record, views
from fedbn_flwr.server.averaging import average, to_shares

FLOWER = "aggregate_arrayrecords"
OURS = "ours"
Times = dict[str, list[float]]


def mlp() -> nn.Module:
    """Return two linear layers, 784-100-10: 80,000 parameters."""
    return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


def cnn() -> nn.Module:
    """Return two convolutions and two linear layers: 1.2 million parameters."""
    features = [
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    ]
    return nn.Sequential(
        *features, nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Linear(128, 10)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": tv.resnet18,
    "mlp": mlp,
    "cnn": cnn,
}


class Round:
    """The replies of a round, and the ways to average them; each returns the seconds of
    its stages.

    Args:
        model: the model that all clients train.
        num_replies: how many clients answer.
    """

    def __init__(self, model: nn.Module, num_replies: int) -> None:
        self.parts = split_state(model)
        self.replies = [_reply(model.state_dict(), i) for i in range(num_replies)]
        self.weights = [float(1 + i) for i in range(num_replies)]
        self.before = views(self.replies[0].array_records["arrays"])
        self.megabytes = sum(array.nbytes for array in self.before.values()) / 1e6

    def ours(self) -> dict[str, float]:
        """Do what the server does with the arrays of the replies."""
        marks = [time.perf_counter()]
        states = [views(reply.array_records["arrays"]) for reply in self.replies]
        marks.append(time.perf_counter())
        for state in states:
            check_state(state, self.before, self.parts)
        marks.append(time.perf_counter())
        mean = average(states, self.weights, self.parts)
        marks.append(time.perf_counter())
        to_record(mean)
        marks.append(time.perf_counter())
        stages = zip(
            ("decode", "check", "average", "encode"), marks[1:], marks[:-1], strict=True
        )
        return {
            **{f"{OURS}: {name}": end - start for name, end, start in stages},
            OURS: marks[-1] - marks[0],
        }

    def flowers(self) -> dict[str, float]:
        """Average as Flower's FedAvg does."""
        start = time.perf_counter()
        aggregate_arrayrecords(self.replies, "num-examples")
        return {FLOWER: time.perf_counter() - start}

    def torchs(self, dtype: torch.dtype) -> dict[str, float]:
        """Add the floating entries up in a dtype with ``add_``."""
        start = time.perf_counter()
        states = [
            tensors(views(reply.array_records["arrays"])) for reply in self.replies
        ]
        sums = {
            name: torch.zeros(x.shape, dtype=dtype)
            for name, x in states[0].items()
            if x.is_floating_point()
        }
        for share, state in zip(to_shares(self.weights), states, strict=True):
            for name, total in sums.items():
                total.add_(state[name], alpha=share)
        return {
            f"add_ in {str(dtype).removeprefix('torch.')}": time.perf_counter() - start
        }


def _reply(state: dict[str, torch.Tensor], client: int) -> RecordDict:
    """Return a reply as a client of Flower makes it, with values of its own."""
    generator = torch.Generator().manual_seed(client)
    own = {
        name: (
            value + torch.rand(value.shape, generator=generator)
            if value.is_floating_point()
            else value + client
        )
        for name, value in state.items()
    }
    return RecordDict(
        {
            "arrays": ArrayRecord(own),
            "metrics": MetricRecord({"num-examples": 1 + client}),
        }
    )


def peak_megabytes(work: Callable[[], Any]) -> float:
    """Return how much memory the work takes at most beside what the process has; NaN
    where the system does not tell.
    """
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak of the memory
        before = _status("VmRSS")
        work()
        return (_status("VmHWM") - before) / 1e3
    except (OSError, AttributeError):
        return float("nan")


def _status(key: str) -> int:
    found = re.search(rf"{key}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) if found else 0


def main(
    model: Annotated[str, typer.Option(help=", ".join(MODELS))] = "resnet18",
    replies: Annotated[int, typer.Option(min=1, help="replies to average")] = 20,
    repeats: Annotated[int, typer.Option(min=1, help="turns of each way")] = 7,
    write: Annotated[
        Path | None, typer.Option(help="a page with the block 'aggregation'")
    ] = None,
) -> None:
    """Compare the server's averaging with Flower's and with bare sums."""
    if model not in MODELS:
        raise typer.BadParameter(f"model '{model}' is not one of {', '.join(MODELS)}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    work = Round(MODELS[model](), replies)
    ways: dict[str, Callable[[], dict[str, float]]] = {
        OURS: work.ours,
        FLOWER: work.flowers,
        "add_ in float32": lambda: work.torchs(torch.float32),
        "add_ in float64": lambda: work.torchs(torch.float64),
    }
    times: Times = {}
    for turn in range(repeats):
        for way in list(ways.values())[:: 1 if turn % 2 == 0 else -1]:
            for name, seconds in way().items():
                times.setdefault(name, []).append(seconds)
    peaks = {name: f"{peak_megabytes(way):.0f}" for name, way in ways.items()}
    medians = {name: statistics.median(measured) for name, measured in times.items()}
    rows = [
        [
            name,
            f"{seconds * 1e3:.2f}",
            f"{seconds / replies * 1e6:.0f}",
            f"{seconds / medians[FLOWER]:.2f}",
        ]
        for name, seconds in medians.items()
    ]
    found = table(
        ["", "ms", "us a reply", f"times {FLOWER}", "peak extra MB"],
        [[*row, peaks.get(row[0], "")] for row in rows],
    )
    note = (
        f"{replies} replies of {model}, {work.megabytes:.1f} MB each; medians of"
        f" {repeats} turns. {facts()}"
    )
    text = f"{found}\n\n{note}"
    print(text)
    if write is not None:
        write_block(write, "aggregation", text)


if __name__ == "__main__":
    typer.run(main)
