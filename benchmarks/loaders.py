"""Users' data sets beside torch's own ``DataLoader``, as ratios of interleaved passes.

    python benchmarks/loaders.py                              # all settings
    python benchmarks/loaders.py --only tensors --turns 20    # one of them

- ``tensors``: 20 clients with a ``TensorDataset`` of 608 examples each train an MLP
  784-100(BN)-10 for one epoch of batches of 32: ``TorchClient.fit``, a loop over a
  ``DataLoader``, and a loop that indexes the tensors.
- ``hugging-face``: one epoch over 1,000 images of a Hugging Face data set with
  ``with_transform``: ``batches_of(loader)`` and the loader itself. Nothing is trained.
- ``folder-0``, ``folder-2``: one epoch over 256 JPEG files in folders with random crops
  and flips, read by 0 or 2 worker processes: ``batches_of(loader)`` and the loader.

Each turn runs every way once, so that load of the machine meets all ways alike. Shown
are the median of the seconds, and of the ratio of the first way to each other way in
the same turn, with the quartiles of this ratio. Everything runs with one torch thread.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
import typer
from measure import facts, in_turns, number, table
from peers import sources
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchvision import transforms

from fedbn_flwr import TorchClient
from fedbn_flwr.training import LearningRate, LocalTraining, batches_of
from fedbn_flwr.training.batches import with_positions

Way = Callable[[], Any]
Ways = dict[str, Way]

CLIENTS, EXAMPLES, BATCH, RATE = 20, 608, 32, 0.1


def mlp() -> nn.Module:
    """Return the model of setting ``fedbn`` in ``simulation.py``."""
    return nn.Sequential(
        nn.Linear(784, 100), nn.BatchNorm1d(100), nn.ReLU(), nn.Linear(100, 10)
    )


@contextmanager
def tensors() -> Iterator[Ways]:
    """Train on tensors in memory."""
    data = [
        TensorDataset(torch.randn(EXAMPLES, 784), torch.randint(10, (EXAMPLES,)))
        for _ in range(CLIENTS)
    ]
    model, settings = mlp(), LocalTraining(learning_rate=LearningRate(RATE))
    start = {name: entry.clone() for name, entry in model.state_dict().items()}
    arrays = [entry.numpy() for entry in start.values()]

    def ours() -> None:
        for k, own in enumerate(data):
            client = TorchClient(mlp_once, own, own, settings, partition_id=k)
            client.fit(arrays, {"server-round": 1})

    def mlp_once() -> nn.Module:
        return model

    def loop(batches: Callable[[TensorDataset], Any]) -> None:
        for own in data:
            model.load_state_dict(start)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), RATE)
            for inputs, targets in batches(own):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    def indexed(own: TensorDataset) -> Iterator[tuple[Tensor, ...]]:
        for at in torch.split(torch.randperm(len(own)), BATCH):
            yield tuple(each[at] for each in own.tensors)

    yield {
        "TorchClient": ours,
        "DataLoader": lambda: loop(lambda own: DataLoader(own, BATCH, shuffle=True)),
        "indexed tensors": lambda: loop(indexed),
    }


def reading(loader: DataLoader[Any]) -> Ways:
    """Read one epoch in random order, without training."""
    data, size = batches_of(loader), len(loader.dataset)  # type: ignore[arg-type]

    def ours() -> None:
        order = torch.split(torch.randperm(size), loader.batch_size or 1)
        for _ in with_positions(data, order, torch.Generator()):
            pass

    def torch_itself() -> None:
        for _ in loader:
            pass

    return {"batches_of(loader)": ours, "the loader": torch_itself}


@contextmanager
def hugging_face() -> Iterator[Ways]:
    """Read a Hugging Face data set."""
    pixels = random_pixels(1000, 32)
    labels = [n % 10 for n in range(len(pixels))]
    data = sources.hugging_face(pixels, labels, transforms.ToTensor())
    loader = DataLoader(data, BATCH, shuffle=True, collate_fn=sources.pairs)
    yield reading(loader)


@contextmanager
def folder(workers: int) -> Iterator[Ways]:
    """Read image files in folders by worker processes."""
    pixels = random_pixels(256, 224)
    labels = [n % 4 for n in range(len(pixels))]
    with tempfile.TemporaryDirectory(prefix="loaders-benchmark-") as root:
        place, steps = Path(root) / "images", [transforms.ToTensor()]
        data = sources.image_folder(place, pixels, labels, steps)
        yield reading(DataLoader(data, BATCH, shuffle=True, num_workers=workers))


def random_pixels(count: int, size: int) -> Any:
    """Return colour images, (count, size, size, 3)."""
    draw = np.random.default_rng(0)
    return draw.integers(256, size=(count, size, size, 3), dtype=np.uint8)


SETTINGS: dict[str, Callable[[], Any]] = {
    "tensors": tensors,
    "hugging-face": hugging_face,
    "folder-0": lambda: folder(0),
    "folder-2": lambda: folder(2),
}


def main(
    turns: Annotated[int, typer.Option(min=2, help="turns of every way")] = 15,
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"settings: {', '.join(SETTINGS)}; default: all"),
    ] = None,
) -> None:
    """Print the seconds and the ratios."""
    torch.set_num_threads(1)
    rows = []
    for name in only or SETTINGS:
        with SETTINGS[name]() as ways:
            for way in ways.values():  # warm-up, because the first pass is slower
                way()
            timed = {f"{name}: {key}": _timed(way) for key, way in ways.items()}
            found = [*in_turns(timed, turns).values()]
        for key, seconds in zip(ways, found, strict=True):
            ratios = [
                ours / other for ours, other in zip(found[0], seconds, strict=True)
            ]
            low, middle, high = statistics.quantiles(ratios, n=4)
            spread = f"{number(middle)} ({number(low)} to {number(high)})"
            rows.append([f"{name}: {key}", number(statistics.median(seconds)), spread])
    print(table(["", "seconds", "first way divided by this one"], rows))
    print(facts())


def _timed(way: Way) -> Callable[[], list[float]]:
    def timed() -> list[float]:
        start = perf_counter()
        way()
        return [perf_counter() - start]

    return timed


if __name__ == "__main__":
    typer.run(main)
