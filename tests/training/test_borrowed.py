"""A borrowed model is as before, and a copy is ``copy.deepcopy``."""

from __future__ import annotations

import copy
import functools
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from fedbn_flwr.errors import StateError
from fedbn_flwr.training.borrowed import borrowed, copied, no_other_state

same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


class Keeping(nn.Module):
    """A model whose passes change tensors, attributes, containers and hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
        self.seen = {"all": [], "last": deque(maxlen=2)}
        self.count, self.bank = 0, torch.zeros(4)
        self.handle = self.norm.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.first(x)
        self.seen["all"].append(self.last * 2)
        self.seen["last"].append(self.count)
        self.count += 1
        self.bank += 1
        self.norm.momentum *= 0.5
        self.handle.remove()
        self.handle = self.norm.register_forward_hook(lambda *_: None)
        self.register_buffer("other", torch.zeros(1))
        return self.norm(self.last)


def described(model: nn.Module) -> list[object]:
    """Return everything that a pass may change, by identity and by value."""
    found: list[object] = []
    for module in model.modules():
        found += [[*map(id, vars(module))], [*map(id, vars(module).values())]]
        found += [repr(one) for one in vars(module).values() if type(one) is not Tensor]
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_a_borrowed_model_is_as_before(fails: bool) -> None:
    model = Keeping().double()
    x = torch.randn(6, 5, dtype=torch.float64)
    model(x).sum().backward()
    state, before = copy.deepcopy(model.state_dict()), described(model)
    gradients = [one.grad for one in model.parameters()]
    places = [one.data_ptr() for one in model.parameters()]
    bank, modes = model.bank.clone(), [one.training for one in model.modules()]
    try:
        with borrowed(model) as lent:
            assert lent is model
            assert all(one.grad is None for one in lent.parameters())
            lent.eval().float().requires_grad_(False)
            lent(x.float()), lent.train()(x.float())
            lent.first = nn.Identity()
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    same(model.state_dict(), state)
    same(model.bank, bank)
    assert described(model) == before
    assert modes == [one.training for one in model.modules()]
    assert all(one.requires_grad for one in model.parameters())
    for one, gradient, place in zip(model.parameters(), gradients, places, strict=True):
        assert one.grad is gradient
        assert one.data_ptr() == place


def test_passes_of_a_borrowed_model_are_not_compiled() -> None:
    backends = []

    def backend(module: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        backends.append(module)
        return module.forward

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.compile(backend=backend)
    with borrowed(model):
        model(torch.zeros(3, 2))
    assert not backends
    model(torch.zeros(3, 2))
    assert backends


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Sequential(nn.Linear(5, 4))
    model[0].more = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(StateError, match=r"cannot be copied .*lock"):
        copied(model)


def _counts_in_closure() -> nn.Module:
    layer, count = nn.Linear(5, 4), 0

    def counts(*_: object) -> None:
        nonlocal count
        count += 1

    layer.register_forward_hook(counts)
    return layer


def _layer(attribute: object, change: Callable[[Any], object]) -> nn.Module:
    """Return a layer whose passes change an object in its attribute."""
    layer = nn.Linear(5, 4)
    layer.more = attribute  # type: ignore[assignment]
    layer.register_forward_pre_hook(lambda *_: print(change(attribute), end=""))
    return layer


class Held:
    """An object with state."""

    count = 0

    def __init__(self) -> None:
        self.seen = {"all": [0]}


class Caching(nn.Module):
    """A layer that keeps a value in eval mode, as LeViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.kept = nn.Parameter(torch.ones(1)), {}

    def train(self, mode: bool = True) -> nn.Module:
        if mode:
            self.kept.clear()
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.kept["weight"] = self.weight.detach() * 2
        return x * self.weight


def _add(one: Any) -> None:
    one.count += 1


CHANGING = {
    "a counter of a hook": _counts_in_closure,
    "an attribute of an object": lambda: _layer(Held(), _add),
    "a list inside an object": lambda: _layer(
        Held(), lambda one: one.seen["all"].append(1)
    ),
    "the values of a tensor": lambda: _layer(
        torch.zeros(2), lambda one: one.data.add_(1)
    ),
    "an array": lambda: _layer(np.zeros(2), lambda one: one.fill(one[0] + 1)),
    "a generator": lambda: _layer(
        torch.Generator(), lambda one: torch.rand(1, generator=one)
    ),
    "a generator of Python": lambda: _layer(random.Random(0), lambda one: one.random()),
    "a cache": lambda: _layer(functools.cache(str), lambda one: one(1)),
    "an iterator": lambda: _layer((n for n in range(9)), next),
    "a set": lambda: _layer({1}, lambda one: one.add(len(one) + 1)),
    "a part of a tuple": lambda: _layer(([], 1), lambda one: one[0].append(1)),
    "the momentum": lambda: _momentum(),
    "a tensor in a list": lambda: _layer(
        [None], lambda one: one.__setitem__(0, torch.ones(1))
    ),
}


def _momentum() -> nn.Module:
    layer = nn.BatchNorm1d(5)
    layer.register_forward_hook(lambda module, *_: setattr(module, "momentum", 0.5))
    return layer


UNCHANGED = {
    "torch's weight_norm": lambda: nn.utils.parametrizations.weight_norm(
        nn.Linear(5, 4)
    ),
    "torch's old weight_norm": lambda: nn.utils.weight_norm(nn.Linear(5, 4)),
    "torch's old spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(5, 4)),
    "pruning": lambda: prune.l1_unstructured(nn.Linear(5, 4), "weight", 0.5),
    "a cache that train mode empties": Caching,
    "running statistics": lambda: nn.BatchNorm1d(5),
    "an LSTM": lambda: nn.LSTM(5, 4),
    "a lock": lambda: _layer(threading.Lock(), lambda one: one.locked()),
    "objects that refer to each other": lambda: _layer(
        (held := [], held.append(held)), lambda one: None
    ),
}


def _passes(model: nn.Module) -> None:
    x = torch.ones(3, 5)
    for mode in (True, False):
        model.train(mode)(x)


@pytest.mark.parametrize("kind", CHANGING)
def test_a_change_outside_the_state_dict_is_found(kind: str) -> None:
    model = CHANGING[kind]()
    with (
        pytest.raises(StateError, match=r"changed attribute '\w+' of"),
        no_other_state(model, "changed {}"),
    ):
        _passes(model)


@pytest.mark.parametrize("kind", UNCHANGED)
def test_a_change_that_no_pass_can_see_is_none(kind: str) -> None:
    model = UNCHANGED[kind]()
    with no_other_state(model, "changed {}"):
        _passes(model)
