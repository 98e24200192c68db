"""A borrowed model is as before, and a copy is ``copy.deepcopy``."""

from __future__ import annotations

import copy
import functools
import threading
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.errors import StateError
from fedbn_flwr.training.borrowed import borrowed, copied, hidden_state

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


def test_hooks_of_torch_have_no_hidden_state_and_counts_have() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4))
    assert not hidden_state(layer)
    count = 0

    def counts(*_: object) -> None:
        nonlocal count
        count += 1

    layer.register_forward_hook(counts)
    assert "has a function" in hidden_state(layer)
