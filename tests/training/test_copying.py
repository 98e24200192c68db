"""A second model is built again, or is an exact copy of a plain model."""

from __future__ import annotations

import copy
import functools
import threading
import warnings
from collections.abc import Callable
from functools import partial
from operator import isub

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm, weight_norm

from fedbn_flwr.errors import StateError
from fedbn_flwr.norms import replace_norm
from fedbn_flwr.training.copying import Template, copied, note_build


class Keeping(nn.Module):
    """A model that keeps its last activation and a list of other activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
        self.seen = {"all": []}

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.first(x)
        self.seen["all"].append(self.last * 2)
        return self.norm(self.last)


class Scaled(nn.Linear):
    """A layer with a function that has an array as its first argument."""

    def __init__(self) -> None:
        super().__init__(5, 4)
        self.scale = partial(np.multiply, np.ones(2))


def normed(kind: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old function is deprecated
        return nn.Sequential(
            kind(nn.Linear(5, 4)), nn.BatchNorm1d(4), kind(nn.Linear(4, 3))
        )


SHARED = torch.ones(2)
MODELS = {
    "weight_norm": lambda: normed(weight_norm),
    "spectral_norm": lambda: normed(spectral_norm),
    "kept activation": Keeping,
    "array": lambda: nn.Sequential(Scaled(), nn.BatchNorm1d(4)),
    "plain": lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)),
}
same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)
NAMED = {
    "weight_norm": r"layer '2' \(Linear\) has a WeightNorm",
    "spectral_norm": r"layer '2' \(Linear\) has a SpectralNorm",
    "kept activation": r"the model \(Keeping\) has a tensor with a graph",
    "array": r"layer '0' \(Scaled\) has a ufunc",
}


@pytest.mark.parametrize("name", MODELS)
def test_a_second_model_is_built_and_trains_as_the_first(name: str) -> None:
    model, x = MODELS[name]().double(), torch.randn(6, 5, dtype=torch.float64)
    model(x)
    before = copy.deepcopy(model.state_dict())
    if name != "plain":
        for call in (copied, functools.partial(replace_norm, kind="group")):
            with pytest.raises(StateError, match=NAMED[name]):
                call(model)
        note_build(model, lambda: MODELS[name]().double())
    other = copied(model)
    for one in (other, model):
        # The training of the other model has not changed this one.
        same(model.state_dict(), before)
        one.load_state_dict(before)
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            one(x).square().sum().backward()
            optimizer.step()
    same(other.state_dict(), model.state_dict())
    assert len(replace_norm(model, "group")[1].replaced) == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (threading.Lock(), "a lock"),
        # The set has a larger table than its copy.
        (isub({*range(80)}, {*range(80)} - {1, 64}), "a set whose order"),
        ([nn.Parameter(SHARED), nn.Parameter(SHARED)], "tensors that share their"),
        ([].append, "a builtin_function_or_method"),
    ],
)
def test_what_cannot_be_copied_names_the_layer(more, said: str) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Sequential(nn.BatchNorm1d(4)))
    model[1][0].activation, model[1][0].more = torch.relu, more
    with pytest.raises(StateError, match=rf"layer '1\.0' \(BatchNorm1d\) has {said}"):
        copied(model)


def test_after_a_compilation_models_are_still_plain() -> None:
    """Torch then has a weak reference to each new module."""
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    compiled(torch.zeros(1, 2))
    Template(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), outside=0)
