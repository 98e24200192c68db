"""A round of this package on a GPU, beside the bare torch loop on the same images:
steps per second of all clients.

    python benchmarks/gpu.py                              # a few minutes
    python benchmarks/gpu.py --write benchmarks/results.md  # the table into the page, between <!-- gpu --> marks
    python benchmarks/gpu.py --device cpu --steps 3       # tries the program

ResNet-20, random images of CIFAR-10's shape that lie on the device, SGD without
momentum. A ratio is that of medians to the bare loop of the same batch size.
"""

from __future__ import annotations

import copy
import os
import platform
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import torch
import typer
from flwr.app import Context
from measure import commit, write_block
from torch import Tensor, nn
from torch.nn import functional

from fedbn_flwr import InProcessGrid, TorchClient, client_app
from fedbn_flwr.lab.models import build_model
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.strategies import FedAvg, FedTAN
from fedbn_flwr.training import LearningRate, LocalTraining

RATE = 0.01
BATCHES = (20, 128)
CLIENTS = 8
DIFFERENT_BATCHES = 8


@dataclass(frozen=True)
class Setting:
    """What is timed: where, on which batches, how many steps a round and how many
    rounds.
    """

    device: torch.device
    batch_size: int
    steps: int
    rounds: int


class Images:
    """A client's images and targets, on the device."""

    def __init__(self, setting: Setting, client: int) -> None:
        generator = torch.Generator().manual_seed(client)
        count = DIFFERENT_BATCHES * setting.batch_size
        self.inputs = torch.randn(count, 3, 32, 32, generator=generator).to(
            setting.device
        )
        self.targets = torch.randint(10, (count,), generator=generator).to(
            setting.device
        )

    def __len__(self) -> int:
        return len(self.targets)

    def batch(
        self, positions: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the images and targets at these positions."""
        positions = positions.to(self.targets.device)
        return self.inputs[positions], self.targets[positions]


def start() -> nn.Module:
    """Return the model that every client starts from, on the CPU."""
    torch.manual_seed(0)
    return build_model("resnet20", num_classes=10, channels=3, size=32)


def wait(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bare(setting: Setting, images: list[Images], amp: bool) -> float:
    """Return the steps per second of the loop that people write without a framework,
    one client after the other.
    """
    seconds = []
    for _ in range(1 + setting.rounds):  # one round more, as a warm-up
        began = time.perf_counter()
        for data in images:
            model = copy.deepcopy(start()).to(setting.device).train()
            optimizer = torch.optim.SGD(model.parameters(), RATE)
            for step in range(setting.steps):
                first = step % DIFFERENT_BATCHES * setting.batch_size
                chosen = slice(first, first + setting.batch_size)
                optimizer.zero_grad()
                with (
                    torch.autocast(setting.device.type, torch.bfloat16)
                    if amp
                    else nullcontext()
                ):
                    loss = functional.cross_entropy(
                        model(data.inputs[chosen]), data.targets[chosen]
                    )
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        wait(setting.device)
        seconds.append(time.perf_counter() - began)
    return len(images) * setting.steps / statistics.median(seconds[1:])


def rounds_of(
    setting: Setting,
    images: list[Images],
    kind: type[FedAvg] | type[FedTAN],
    amp: bool,
    workers: int,
) -> float:
    """Return the steps per second of rounds of a strategy, with the clients in worker
    processes (0: in this one).
    """
    training = LocalTraining(
        learning_rate=LearningRate(RATE),
        local_steps=setting.steps,
        batch_size=setting.batch_size,
        amp=amp,
    )

    def client_fn(context: Context) -> TorchClient:
        data = images[int(context.node_config["partition-id"])]
        return TorchClient(
            start().to(setting.device), data, data, training, context=context
        )

    ends: list[float] = []
    with InProcessGrid(client_app(client_fn), len(images), workers=workers) as grid:
        kind(fraction_evaluate=0.0).start(
            grid=grid,
            initial_arrays=to_record(start().state_dict()),
            num_rounds=1 + setting.rounds,
            evaluate_fn=lambda *_: ends.append(time.perf_counter()),
        )
    # Leave out the test before round 1, and round 1, in which the workers start.
    seconds = [after - before for before, after in pairwise(ends[1:])]
    return len(images) * setting.steps / statistics.median(seconds)


def main(
    device: Annotated[
        str, typer.Option(help="cuda, cuda:N, or cpu to try the program")
    ] = "cuda",
    steps: Annotated[
        int, typer.Option(min=1, help="steps of a client in a round")
    ] = 30,
    rounds: Annotated[int, typer.Option(min=1, help="timed rounds of each way")] = 5,
    write: Annotated[
        Path | None,
        typer.Option(help="a page with the marks <!-- gpu --> and <!-- /gpu -->"),
    ] = None,
) -> None:
    """Time rounds on a GPU."""
    where = torch.device(device)
    torch.set_num_threads(1)  # as many threads as a client has
    if where.type == "cuda" and not torch.cuda.is_available():
        message = (
            "there is no CUDA device here. To try the program: --device cpu --steps 3"
        )
        raise typer.BadParameter(message, param_hint="--device")
    lines = ["| way | batch | steps/s | / bare |", "|---|---:|---:|---:|"]
    for batch_size in BATCHES:
        setting = Setting(where, batch_size, steps, rounds)
        images = [Images(setting, client) for client in range(CLIENTS)]
        found = {"bare torch loop": bare(setting, images, amp=False)}
        found["bare torch loop, bf16"] = bare(setting, images, amp=True)
        found["FedAvg, in the process"] = rounds_of(
            setting, images, FedAvg, amp=False, workers=0
        )
        found["FedAvg, in the process, bf16"] = rounds_of(
            setting, images, FedAvg, amp=True, workers=0
        )
        found["FedAvg, 2 workers"] = rounds_of(
            setting, images, FedAvg, amp=False, workers=2
        )
        found["FedTAN, in the process"] = rounds_of(
            setting, images, FedTAN, amp=False, workers=0
        )
        for name, rate in found.items():
            lines.append(
                f"| {name} | {batch_size} | {rate:.1f} |"
                f" {rate / found['bare torch loop']:.2f} |"
            )
    name = (
        torch.cuda.get_device_name(where)
        if where.type == "cuda"
        else platform.processor() or platform.machine()
    )
    about = (
        f"{name}, {os.cpu_count()} CPU cores, torch {torch.__version__}, commit"
        f" {commit() or 'unknown'}."
    )
    text = "\n".join(
        [
            *lines,
            "",
            f"{CLIENTS} clients, medians of {rounds} rounds of {steps} steps. {about}",
        ]
    )
    print(text)
    if write:
        write_block(write, "gpu", text)


if __name__ == "__main__":
    typer.run(main)
