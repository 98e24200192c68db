"""The attributes of a model are found, compared and restored."""

from __future__ import annotations

import copy
import logging
import pickle
import random
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fedbn_flwr.training.attributes import Attributes, unchanged
from fedbn_flwr.training.evaluation import evaluate
from tests.support.points import Points


class Plain:
    """An object of a user's class."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


@dataclass
class Record:
    inner: Any
    others: list[Any] = field(default_factory=list)


LEAVES = st.one_of(
    st.none(),
    st.integers(0, 3),
    st.floats(allow_nan=True),
    st.builds(lambda n: torch.full((2,), float(n)), st.integers(0, 3)),
    st.builds(lambda n: torch.tensor([torch.nan, n]), st.integers(0, 3)),
    st.builds(lambda n: np.full(2, float(n)), st.integers(0, 3)),
    st.builds(random.Random, st.integers(0, 3)),
    st.builds(np.random.default_rng, st.integers(0, 3)),
    st.builds(lambda: {1, 2}),
    st.builds(lambda n: deque([torch.full((1,), float(n))]), st.integers(0, 3)),
    st.builds(lambda n: torch.Generator().manual_seed(n), st.integers(0, 3)),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.tuples(inner),
        st.builds(Plain, inner),
        st.builds(Record, inner, st.lists(inner, max_size=2)),
        st.builds(lambda value: [nn.Sequential(Holder(value))], inner),
    ),
    max_leaves=6,
)


class Holder(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.layer, self.value = nn.Linear(2, 2), value
        # A module in a list has no entries in the state dict.
        self.hidden = [nn.BatchNorm1d(2)]
        self.register_buffer("outside", torch.zeros(2), persistent=False)


def written(value: Any) -> Any:
    """Return a value that is equal for equal contents."""
    if isinstance(value, torch.Tensor):
        return value.detach().numpy().tobytes()
    if isinstance(value, nn.Module):
        parts = [written(vars(value)[part]) for part in ("_parameters", "_buffers")]
        others = {
            n: v for n, v in vars(value).items() if n not in ("_parameters", "_buffers")
        }
        return [*parts, written(others)]
    if isinstance(value, dict):
        return [(key, written(one)) for key, one in value.items()]
    if isinstance(value, list | tuple | deque):
        return [written(one) for one in value]
    if isinstance(value, Plain | Record):
        return written(vars(value))
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    return pickle.dumps(value)


def change(value: Any, draw: Any) -> bool:
    """Change something inside a value in place, and return whether it was possible."""
    kind = draw.draw(st.booleans())
    match value:
        case torch.Tensor():
            value.data += 1
        case np.ndarray():
            value[0] += 1
        case random.Random() | np.random.Generator():
            value.random()
        case set():
            value.add(7)
        case torch.Generator():
            torch.rand(2, generator=value)
        case deque():
            value[0] += 1
            value.append(2)
        case list() if not value or kind:
            value.append(draw.draw(st.integers(5, 6)))
        case dict() if not value or kind:
            value["new"] = 1
        case list() | tuple():
            changed = [change(one, draw) for one in value]
            return any(changed)
        case dict():
            changed = [change(one, draw) for one in [*value.values()]]
            return any(changed)
        case nn.Sequential():
            return change(value[0].value, draw) or change(value[0].hidden, draw)
        case nn.Module():
            value.momentum = 0.7
        case Plain() | Record():
            if change(value.inner, draw):
                return True
            value.inner = "new"
        case _:
            return False
    return True


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(VALUES, st.data())
def test_what_changes_at_any_depth_is_named_and_put_back(value: Any, data: Any) -> None:
    model = nn.Sequential(Holder(value), Holder([value]))
    attributes, before = Attributes(model), written(model)
    assert attributes.changed() == []
    for _ in range(2):  # a restored value can change again
        names = set()
        if change(model[0].value, data):
            names.add("value")
        if data.draw(st.booleans()):
            model[1].outside += 1
            names.add("outside")
        if data.draw(st.booleans()):
            model[1].register_forward_hook(print)
            names.add("_forward_hooks")
        if data.draw(st.booleans()):
            model[0].layer.left = 3
            names.add("left")
        # Both layers have the value, and either may be named.
        assert {name for _, name in attributes.changed()} == names
        attributes.restore()
        assert written(model) == before
        assert attributes.changed() == []


def test_the_state_stays_and_what_shares_its_memory() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.view, self.flat = self.layer.weight.data.t(), [self.layer.weight]

    model = Views()
    attributes = Attributes(model)
    with torch.no_grad():
        model.layer.weight += 1
    trained = model.layer.weight.clone()
    attributes.restore()
    assert torch.equal(model.layer.weight, trained)
    assert torch.equal(model.view, trained.t())


def test_values_of_the_process_are_left_as_they_are() -> None:
    """A logger, a lock and a function belong to all."""
    model = Holder([logging.getLogger("a layer"), threading.Lock(), lambda: 1])
    attributes = Attributes(model)
    model.value[0].addHandler(logging.NullHandler())
    model.value[1].acquire()
    assert attributes.changed() == []
    attributes.restore()
    assert model.value[0].handlers
    assert model.value[1].locked()


def test_a_value_of_the_class_is_put_back() -> None:
    class Counts(nn.Module):
        calls: list[int] = []

    model = Counts()
    attributes = Attributes(model)
    model.calls.append(1)
    assert attributes.changed() == [("", "calls")]
    attributes.restore()
    assert Counts.calls == []


class Merges(nn.Linear):
    """A layer that changes its weight, inexactly, with the mode."""

    merged = False

    def train(self, mode: bool = True) -> Merges:
        if self.merged == mode:
            self.weight.data += (-1 if mode else 1) * self.weight / 3
            self.merged = not mode
        return super().train(mode)


@pytest.mark.parametrize("mode", [True, False])
def test_a_test_changes_no_bit_of_a_layer_that_overrides_train(mode: bool) -> None:
    model = nn.Sequential(Merges(5, 3), nn.BatchNorm1d(3)).double().train(mode)
    before = copy.deepcopy(model)
    data = Points(torch.randn(4, 5, dtype=torch.float64), torch.arange(4) % 3)
    evaluate(model, data)
    with unchanged(model):
        model.train(not mode)
    for name, entry in before.state_dict().items():
        assert torch.equal(model.state_dict()[name], entry), name
    assert (model.training, model[0].merged) == (mode, before[0].merged)


def test_what_a_layer_keeps_of_a_test_does_not_reach_the_next() -> None:
    class Caches(nn.Linear):
        passes = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = vars(self).setdefault("kept", self.weight.detach().clone())
            self.passes += 1
            return nn.functional.linear(x, kept, self.bias)

        def get_extra_state(self) -> torch.Tensor:
            return torch.tensor(self.passes)

    model = Caches(5, 3).double()
    data = Points(torch.randn(4, 5, dtype=torch.float64), torch.arange(4) % 3)
    first = evaluate(model, data).loss
    nn.init.zeros_(model.weight)
    other = evaluate(model, data).loss
    nn.init.zeros_(model.bias)
    assert len({first, other, evaluate(model, data).loss}) == 3
    assert not hasattr(model, "kept")
    assert not model.passes
