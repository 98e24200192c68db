"""The memory of a test by the pixels of its images and the examples of its batches.

    python benchmarks/memory_of_tests.py
    python benchmarks/memory_of_tests.py --pixels 512 --batch 0 --batch 100

``evaluate`` of a ResNet-18 on black images, two batches of them, or one of 500, in float32 with one thread.
Each point runs in a fresh process. Shown is the largest resident set of that process beyond what it needed after its
imports and its model. Batch 0 is the default of ``test-batch-size`` for images of that size.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from typing import Annotated

import torch
import typer
from torch import Tensor

from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.models import build_model
from fedbn_flwr.training.evaluation import evaluate

BATCH = 500
MODEL = "torchvision:resnet18"


class Images:
    """Black images, made for each batch."""

    def __init__(self, pixels: int, count: int) -> None:
        self.pixels, self.count = pixels, count

    def __len__(self) -> int:
        return self.count

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return images and classes."""
        return torch.zeros(len(positions), 3, self.pixels, self.pixels), torch.zeros(len(positions), dtype=torch.long)


def default(pixels: int) -> int:
    """Return the examples of a batch where ``test-batch-size`` is not set."""
    task = Config.make({"dataset": "cifar10", "model": MODEL, "image-size": pixels}).test_task()
    return task.plain_test_batch or task.test_batch


def point(pixels: int, batch: int) -> None:
    """Print the memory in GB and the seconds of a test."""
    torch.set_num_threads(1)
    model = build_model(MODEL, num_classes=10, channels=3, size=pixels)
    before, begun = _largest(), time.monotonic()
    evaluate(model, Images(pixels, 2 * batch if batch < BATCH else batch), batch_size=batch)
    print(f"{_largest() - before:.2f} {time.monotonic() - begun:.0f}")


def _largest() -> float:
    """Return the largest resident set so far, GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main(
    pixels: Annotated[list[int] | None, typer.Option(help="Pixels of a side.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Examples of a batch; 0 = the default.")] = None,
) -> None:
    """Print a line for each number of pixels and each batch."""
    for side in pixels or [64, 128, 256]:
        for size in batch or [0, BATCH]:
            examples = size or default(side)
            code = f"import sys; sys.path.insert(0, {sys.path[0]!r}); import memory_of_tests; "
            code += f"memory_of_tests.point({side}, {examples})"
            found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
            memory, seconds = found.split()
            print(f"{side} pixels, {examples} a batch: {memory} GB, {seconds} s", flush=True)


if __name__ == "__main__":
    typer.run(main)
