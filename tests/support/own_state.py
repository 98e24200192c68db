"""Layers that keep state outside the state dict."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Count = Callable[[nn.Module], float]
"""Counts the training passes of a layer, in state of some kind."""


@dataclasses.dataclass(slots=True)
class Slots:
    passes: int = 0


def in_slots() -> Count:
    slots = Slots()

    def count(layer: nn.Module) -> float:
        layer.kept = getattr(layer, "kept", slots)
        layer.kept.passes += 1
        return layer.kept.passes

    return count


def in_closure() -> Count:
    passes = {"now": 0}

    def count(layer: nn.Module) -> float:
        passes["now"] += 1
        return passes["now"]

    return count


def in_default(layer: nn.Module, *, passes: list[int]) -> float:
    passes.append(1)
    return len(passes)


def by_torch() -> Count:
    return functools.partial(
        lambda kept, layer: torch.rand((), generator=kept),
        torch.Generator().manual_seed(3),
    )


def on_parameter(layer: nn.Module) -> float:
    layer.scale.steps = getattr(layer.scale, "steps", 0) + 1
    return layer.scale.steps


def on_module(layer: nn.Module) -> float:
    layer.steps = getattr(layer, "steps", 0) + 1
    return layer.steps


def by_itertools() -> Count:
    return functools.partial(lambda kept, layer: next(kept), itertools.count(1))


def by_numpy() -> Count:
    return functools.partial(
        lambda kept, layer: kept.normal(), np.random.RandomState(3)
    )


def in_queue() -> Count:
    kept: collections.deque[int] = collections.deque()

    def count(kept: Any, layer: nn.Module) -> float:
        kept.append(1)
        return len(kept)

    return functools.partial(count, kept)


def in_bytes() -> Count:
    def count(kept: bytearray, layer: nn.Module) -> float:
        kept[0] += 1
        return kept[0]

    return functools.partial(count, bytearray(1))


def unfreezes(layer: nn.Module) -> float:
    trained = layer.shift.requires_grad
    layer.shift.requires_grad_(True)
    return 5.0 * trained


class Keeps(nn.Module):
    """A layer whose scale depends on its training passes."""

    def __init__(self, kind: str, features: int) -> None:
        super().__init__()
        self.count = STATES[kind]()
        self.scale = nn.Parameter(torch.ones(features))
        self.shift = nn.Parameter(torch.zeros(features), False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * (1 + 0.1 * self.count(self))
        return x * self.scale + self.shift


STATES: dict[str, Callable[[], Count]] = {
    "slots": in_slots,
    "closure": in_closure,
    "default argument": lambda: functools.partial(in_default, passes=[]),
    "torch": by_torch,
    "attribute of a parameter": lambda: on_parameter,
    "attribute of a module": lambda: on_module,
    "itertools": by_itertools,
    "NumPy": by_numpy,
    "deque": in_queue,
    "bytearray": in_bytes,
    "requires_grad": lambda: unfreezes,
}
