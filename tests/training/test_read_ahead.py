"""Workers of a loader read in advance, and never change a bit."""

from __future__ import annotations

import functools
import multiprocessing
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from fedbn_flwr.batchnorm.reestimation import reestimate_statistics
from fedbn_flwr.client.own_loop import train_by
from fedbn_flwr.doctor.clients import read_clients
from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.machine import threads
from fedbn_flwr.training import LocalTraining, batches_of
from fedbn_flwr.training.batches import with_positions
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.loop import train
from fedbn_flwr.training.randomness import seeded
from tests.support.fast import fast

pytestmark = pytest.mark.xdist_group("loader workers")

ORDER = torch.split(torch.randperm(23, generator=torch.Generator().manual_seed(0)), 4)
LATER = int(ORDER[3][0])  # an example of the fourth batch


class Pictures(Dataset[Any]):
    """Examples that a function augments."""

    def __init__(self, augment: Callable[[int], Any]) -> None:
        self.augment = augment

    def __len__(self) -> int:
        return 23

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.full((5,), float(number)) + self.augment(number), number % 2


def crop(number: int) -> int:
    """Draw until a number fits, with an unknown number of draws."""
    while torch.rand(1) < 0.5:
        number += 1
    return number


AUGMENTS = {
    "no draws": lambda _: 0,
    "draws until one fits": crop,
    "normal numbers, kept in pairs": lambda _: np.random.standard_normal(),
    "python": lambda _: random.random(),
    "a mean that several threads could compute": lambda _: torch.rand(100_000).mean(),
    "draws of some examples": lambda number: torch.rand(1) if number > 15 else 0,
}


def draws() -> tuple[float, float, float]:
    """Draw from the default generators."""
    return torch.rand(1).item(), np.random.standard_normal(), random.random()


def read(data: Dataset[Any], workers: int, seed: int | None) -> list[Any]:
    """Return the batches of a pass. It leaves the default generators alone."""
    batches = batches_of(DataLoader(data, num_workers=workers))
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    found = []
    with seeded(5):
        untouched = draws()
    with seeded(5), threads(2):
        for positions, pair in with_positions(batches, ORDER, generator):
            found += [positions.tolist(), *(part.tolist() for part in pair)]
        assert draws() == untouched
        return [*found, generator and generator.get_state().tolist()]


@pytest.mark.parametrize("kind", fast(AUGMENTS, 1, 3, 4))
def test_the_number_of_workers_does_not_change_a_bit(kind: str) -> None:
    data = Pictures(AUGMENTS[kind])
    for seed in (7, None):
        wanted, *others = (read(data, workers, seed) for workers in (0, 1, 2))
        assert others == [wanted, wanted]


def test_a_worker_init_fn_finds_its_data_set_and_has_other_seeds_in_each_pass() -> None:
    """Its own generators would otherwise draw the same numbers in each round."""

    def init(_: int) -> None:
        info = get_worker_info()
        info.dataset.augment = lambda number: info.seed % 2**20

    loader = DataLoader(Pictures(crop), num_workers=1, worker_init_fn=init)
    found = []
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        order = with_positions(batches_of(loader), ORDER, generator)
        found.append({float(inputs.mean()) for _, (inputs, _) in order})
    assert found[0].isdisjoint(found[1])


def test_a_diagnosis_draws_other_transforms_for_each_client() -> None:
    data = Pictures(lambda number: torch.rand(1) - number)
    one, other = read_clients([DataLoader(data), DataLoader(data)], 15)
    assert not torch.isin(one.inputs, other.inputs).any()


class Breaks(nn.Module):
    """A model whose second pass in train or eval mode raises."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.passes = nn.BatchNorm1d(5), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += len(x) > 1
        if self.passes > 1:
            raise KeyError
        return self.norm(x)


def loop(model: Any, batches: Any, rules: Any, learning_rate: float) -> None:
    for inputs, _ in batches:
        model(inputs)


TRAINING = {
    "settings": LocalTraining(learning_rate=0.1, batch_size=4),
    "learning_rate": 0.1,
    "stream": lambda _: torch.Generator(),
    "hooks": {},
}
PASSES = {
    "training": lambda data: train(Breaks(), data, **TRAINING),
    "a loop": lambda data: train_by(loop, lambda _: None, Breaks(), data, **TRAINING),
    "a test": lambda data: evaluate(Breaks(), data, batch_size=4),
    "statistics": lambda data: reestimate_statistics(Breaks(), data, batch_size=4),
}


@pytest.mark.parametrize("kind", PASSES)
def test_a_pass_that_ends_early_leaves_no_workers(kind: str) -> None:
    """An error keeps the frames of the pass."""
    data = batches_of(DataLoader(Pictures(crop), num_workers=2))
    with pytest.raises((KeyError, ConfigError)) as raised:
        PASSES[kind](data)
    assert not multiprocessing.active_children(), raised


def fails(number: int) -> int:
    if number == LATER:
        raise KeyError(number)
    return 0


with_workers = functools.partial(DataLoader, num_workers=2, timeout=1)


class Uneven(Pictures):
    """Examples whose ``__getitems__`` omits one example."""

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [self[number] for number in numbers if number != LATER]


class Threes(Pictures):
    """Examples of three parts."""

    def __getitem__(self, number: int) -> Any:
        return number, number, number


class Balanced(RandomSampler):
    """A sampler that chooses examples, although its class chooses all."""

    def __iter__(self) -> Iterator[int]:
        return iter([0, 1] * 11 + [0])


class Stream(IterableDataset[Any]):
    """Examples without numbers."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


SAMPLERS = {
    "that draws": WeightedRandomSampler([1.0] * 23, 23),
    "that draws fewer": RandomSampler(range(23), num_samples=5),
    "that draws more": RandomSampler(range(23), num_samples=46),
    "that draws some twice": RandomSampler(range(23), replacement=True),
    "of a class of its own": Balanced(range(23)),
}
FAULTS = {
    "a stream": (DataLoader(Stream()), DataError, "Stream"),
    **{
        f"a sampler {name}": (
            DataLoader(Pictures(fails), sampler=sampler),
            DataError,
            f"Pictures: the loader's sampler, {type(sampler).__name__}",
        )
        for name, sampler in SAMPLERS.items()
    },
    "three parts": (
        with_workers(Threes(fails)),
        DataError,
        "of Threes is a list of length 3",
    ),
    "an error of the data set": (with_workers(Pictures(fails)), KeyError, str(LATER)),
    "an omitted example": (
        with_workers(Uneven(fails)),
        DataError,
        "Uneven: a batch has targets of shape",
    ),
}


def take_steps(loader: DataLoader[Any], seen: list[int]) -> None:
    for positions, _ in with_positions(batches_of(loader), ORDER, torch.Generator()):
        seen.append(len(positions))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_an_error_and_leaves_nothing_behind(fault: str) -> None:
    loader, error, text = FAULTS[fault]
    seen, before = [], torch.get_rng_state()
    with pytest.raises(error, match=text) as raised:
        take_steps(loader, seen)
    if error is KeyError:
        assert seen == [4, 4, 4]
    assert torch.equal(torch.get_rng_state(), before)
    assert not multiprocessing.active_children(), raised  # it keeps the frames
