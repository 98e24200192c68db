"""What masked sums cost: seconds and bytes of a round with masks and without, side by
side.

    python benchmarks/masked.py   # ResNet-20, 5 and 10 clients, 1 minute

Clients run in this process, one after the other, on one thread; each trains one step on
four images, so that what is seen is the masks. Rounds with masks and without take
turns; medians are shown. Bytes up are those of all arrays and of the masks' keys and
shares that one client sends in a round.
"""

from __future__ import annotations

import functools
import logging
import os
import statistics
import time
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import torch
import typer
from flwr.app import ArrayRecord, Context, Message
from measure import table
from torch import Tensor

from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.lab.models import build_model
from fedbn_flwr.privacy import MaskedSums, MaskSettings
from fedbn_flwr.strategies import FedAvg, FedTAN
from fedbn_flwr.training import LearningRate, LocalTraining


class Images:
    """Four random images of 8 by 8 pixels."""

    def __init__(self) -> None:
        self.inputs, self.targets = torch.randn(4, 3, 8, 8), torch.arange(4)

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(
        self, positions: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the images at these positions, and their classes."""
        return self.inputs[positions], self.targets[positions]


class CountingGrid(InProcessGrid):
    """Counts the bytes of all arrays, keys and shares in the replies."""

    up = 0

    def pull_messages(self, *args: Any, **kwargs: Any) -> list[Message]:
        """Return the replies that are ready."""
        replies = super().pull_messages(*args, **kwargs)
        for content in (reply.content for reply in replies if reply.has_content()):
            self.up += sum(
                len(array.data)
                for record in content.array_records.values()
                for array in record.values()
            )
            lists: list[Any] = [
                v for record in content.config_records.values() for v in record.values()
            ]
            self.up += sum(
                len(part)
                for v in lists
                if isinstance(v, list)
                for part in v
                if isinstance(part, bytes)
            )
        return replies


def measure(method: str, num_clients: int, masked: bool) -> tuple[float, float]:
    """Return the seconds of a round, and the bytes that a client sends in it."""
    model = functools.partial(
        build_model, "resnet20", num_classes=10, channels=3, size=32
    )
    training = LocalTraining(
        learning_rate=LearningRate(0.1), batch_size=0, local_steps=1
    )

    def client_fn(context: Context) -> TorchClient:
        return TorchClient(model, data, data, training, context=context)

    data: Any = Images()
    strategy: Any = {"fedavg": FedAvg, "fedtan": FedTAN}[method](fraction_evaluate=0.0)
    if masked:
        strategy.protect(MaskedSums(MaskSettings(masked_sums=True)))
    grid = CountingGrid(client_app(client_fn), num_clients)
    with grid:
        began = time.perf_counter()
        strategy.start(grid, ArrayRecord(model().state_dict()), num_rounds=1)
        seconds = time.perf_counter() - began
    (report,) = strategy.reports
    exchanged = (
        (report.train.up / num_clients - 4 * 271098 * (1 + masked))
        if method == "fedtan"
        else 0.0
    )
    return seconds, grid.up / num_clients + exchanged


def main(
    clients: Annotated[
        list[int] | None, typer.Option(help="clients of a round")
    ] = None,
    repeats: Annotated[int, typer.Option(help="rounds of each kind")] = 3,
) -> None:
    """Print the table."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = []
    for method in ("fedavg", "fedtan"):
        for count in clients or [5, 10]:
            found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
            for _ in range(repeats):
                for masked in found:
                    found[masked].append(measure(method, count, masked))
            plain, ours = (
                statistics.median(seconds for seconds, _ in found[masked])
                for masked in (False, True)
            )
            (_, before), (_, after) = found[False][0], found[True][0]
            row = [
                method,
                str(count),
                f"{plain:.2f}",
                f"{ours:.2f}",
                f"{(ours - plain) / count:.3f}",
            ]
            rows.append([*row, f"{before / 1e6:.2f}", f"{after / 1e6:.2f}"])
    head = [
        "method",
        "clients",
        "s plain",
        "s masked",
        "s more per client",
        "MB up plain",
        "MB up masked",
    ]
    print(table(head, rows))


if __name__ == "__main__":
    typer.run(main)
