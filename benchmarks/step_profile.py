"""A training step of ResNet-20 on small batches, as in FixBN's Table 4: what it costs in each way, and where it goes.

    python benchmarks/step_profile.py --write docs/performance.md  # a minute on one core

The ways take turns; each number is the median over the turns. The shares are self times of torch's profiler.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from measure import facts, number, table, write_block
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fedbn_flwr.lab.models import build_model
from fedbn_flwr.seeds import torch_generator
from fedbn_flwr.training import LearningRate, LocalTraining, train

KINDS = {"convolutions": ("conv",), "normalisation": ("batch_norm", "group_norm"), "copies": ("copy_", "clone")}


@dataclass(frozen=True)
class Way:
    """How the steps are computed."""

    name: str
    norm: str = "batch"
    amp: bool = False
    channels_last: bool = False
    compiled: bool = False


WAYS = (
    Way("float32"),
    Way("float32, channels-last", channels_last=True),
    Way("bfloat16", amp=True),
    Way("bfloat16, channels-last", amp=True, channels_last=True),
    Way("bfloat16, channels-last, compile", amp=True, channels_last=True, compiled=True),
    Way("GN: bfloat16, channels-last", "group", amp=True, channels_last=True),
    Way("GN: bfloat16, channels-last, compile", "group", amp=True, channels_last=True, compiled=True),
)


class Images:
    """Random images of CIFAR-10's size, and their classes."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(count, 3, 32, 32, generator=generator)
        self.targets = torch.randint(10, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, positions: torch.Tensor, generator: torch.Generator | None = None) -> Any:
        """Return the images at the positions."""
        return self.inputs[positions], self.targets[positions]


def main(
    batch_size: Annotated[int, typer.Option(help="Images of a step.")] = 20,
    steps: Annotated[int, typer.Option(help="Steps of a turn.")] = 20,
    turns: Annotated[int, typer.Option(help="Turns of each way.")] = 7,
    write: Annotated[Path | None, typer.Option(help="Page with a place for the table.")] = None,
) -> None:
    """Time the ways in turn on one core, then profile each once."""
    torch.set_num_threads(1)
    data = Images(10 * batch_size)
    settings = LocalTraining(
        learning_rate=LearningRate(0.02), local_steps=steps, batch_size=batch_size, sgd_momentum=0.9, weight_decay=1e-4
    )
    models = {way: _model(way) for way in WAYS}
    seconds: dict[Way, list[float]] = {way: [] for way in WAYS}
    for turn in range(turns + 1):
        for way, model in models.items():
            begin = time.perf_counter()
            _steps(way, model, data, settings)
            if turn:  # the first one warms up, and compiles
                seconds[way].append((time.perf_counter() - begin) / steps)
    base = statistics.median(seconds[WAYS[0]])
    rows = []
    for way, model in models.items():
        median = statistics.median(seconds[way])
        shares = _shares(way, model, data, settings)
        rows.append([way.name, f"{1000 * median:.1f}", f"{median / base:.2f}", *(number(s, 2) for s in shares)])
    head = ["way", "ms a step", f"/ {WAYS[0].name}", *(f"{kind}, %" for kind in KINDS), "other, %"]
    text = f"{table(head, rows)}\n\nBatches of {batch_size}; medians of {turns} turns of {steps} steps. {facts()}"
    print(text)
    if write:
        write_block(write, "step_profile", text)


def _model(way: Way) -> nn.Module:
    torch.manual_seed(0)
    model = build_model("resnet20", num_classes=10, channels=3, size=32, norm=way.norm)
    if way.channels_last:
        model = model.to(memory_format=torch.channels_last)
    return torch.compile(model) if way.compiled else model  # type: ignore[return-value]


def _steps(way: Way, model: nn.Module, data: Images, settings: LocalTraining) -> None:
    train(
        model,
        data,
        replace(settings, amp=way.amp),
        learning_rate=0.02,
        stream=lambda purpose: torch_generator(0, purpose, 1),
    )


def _shares(way: Way, model: nn.Module, data: Images, settings: LocalTraining) -> list[float]:
    """Return the per cents of the CPU time that each kind of operation takes, and the others; none if compiled."""
    if way.compiled:
        return [float("nan")] * (len(KINDS) + 1)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        _steps(way, model, data, settings)
    times = {event.key: event.self_cpu_time_total for event in seen.key_averages()}
    total = sum(times.values())
    parts = []
    for words in KINDS.values():
        matching = [value for key, value in times.items() if any(word in key for word in words)]
        parts.append(100 * sum(matching) / total)
    return [*parts, 100 - sum(parts)]


if __name__ == "__main__":
    typer.run(main)
