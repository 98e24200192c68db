"""One seed, many streams."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.training import LocalTraining
from fedbn_flwr.training.loop import train
from fedbn_flwr.training.randomness import derive_seed, numpy_generator, torch_generator


def test_the_seed_is_the_documented_hash() -> None:
    digest = hashlib.sha256(b"3/batches/12/0").digest()
    assert derive_seed(3, "batches", 12, 0) == int.from_bytes(digest[:8], "big") >> 1


def test_streams_are_the_same_on_every_machine() -> None:
    """The golden numbers come from the same calls."""
    drawn = numpy_generator(5, "x", "a", 1).integers(10**9, size=3)
    assert drawn.tolist() == [936399188, 628667064, 842350217]
    drawn = torch.randint(10**9, (3,), generator=torch_generator(5, "x", "a", 1))
    if torch.__version__ >= (2, 8):  # torch 2.6 draws other numbers
        assert drawn.tolist() == [845660191, 920378236, 542855088]


class Rows:
    """A data set that notes the positions and the augmentation of its batches."""

    def __init__(self) -> None:
        self.seen = {"batches": [], "augment": []}

    def __len__(self) -> int:
        return 24

    def batch(
        self, positions: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        drawn = torch.rand(3, generator=generator)
        self.seen["batches"].append(positions.tolist())
        self.seen["augment"].append(drawn.tolist())
        return torch.ones(len(positions), 8), positions % 2


@pytest.mark.parametrize("changed", ["batches", "augment", "dropout"])
def test_each_purpose_of_a_training_draws_from_its_own_stream(changed: str) -> None:
    """With another seed for one purpose, only its draws change."""

    def draws(seed: int) -> dict[str, list[list[float]]]:
        data, masks = Rows(), []
        model = nn.Sequential(nn.Dropout(), nn.Linear(8, 2))
        model[0].register_forward_hook(
            lambda layer, inputs, outputs: masks.append(outputs.flatten().tolist())
        )
        seeds = {"batches": 0, "augment": 0, "dropout": 0, changed: seed}
        train(
            model,
            data,
            LocalTraining(local_epochs=2, batch_size=8, learning_rate=0.1),
            learning_rate=0.1,
            stream=lambda purpose: torch.Generator().manual_seed(seeds[purpose]),
        )
        return {**data.seen, "dropout": masks}

    one, other = draws(0), draws(1)
    assert {name for name in one if one[name] != other[name]} == {changed}
    # Equal seeds are equal streams, so the draws of a purpose differ from step to step.
    assert all(len(set(map(tuple, steps))) == 6 for steps in one.values())
