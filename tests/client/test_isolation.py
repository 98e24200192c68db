"""Nothing that training leaves in a model, loop or loss reaches another client."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import InProcessGrid, TorchClient, client_app
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.strategies import FedBN, FedTAN
from fedbn_flwr.training import CLASSIFICATION, LearningRate, LocalTraining, Task

SIZES = (6, 13, 9)
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


def numbers() -> Iterator[int]:
    yield from range(1, 1000)


def from_generator() -> Count:
    kept = numbers()
    return lambda layer: next(kept)


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

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.shift = nn.Parameter(torch.zeros(4, dtype=torch.float64), False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * (1 + 0.1 * self.count(self))
        return x * self.scale + self.shift


STATES: dict[str, Callable[[], Count]] = {
    "slots": in_slots,
    "closure": in_closure,
    "default argument": lambda: functools.partial(in_default, passes=[]),
    "generator": from_generator,
    "attribute of a parameter": lambda: on_parameter,
    "attribute of a module": lambda: on_module,
    "itertools": by_itertools,
    "NumPy": by_numpy,
    "deque": in_queue,
    "bytearray": in_bytes,
    "requires_grad": lambda: unfreezes,
}


def build(kind: str) -> nn.Module:
    layer = Keeps(STATES[kind]()) if kind in STATES else nn.Identity()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), layer, nn.Linear(4, 3))
    if kind == "hook":
        passes: list[int] = []

        def grow(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            passes.append(1)
            return output * (1 + 0.1 * len(passes))

        model[0].register_forward_hook(grow)
    return model.double()


class Counts(nn.Module):
    """A loss that depends on the classes that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(3, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.seen += torch.bincount(targets, minlength=3)
        return F.cross_entropy(outputs + (self.seen / self.seen.sum()).log(), targets)


def with_loss() -> Task:
    return dataclasses.replace(CLASSIFICATION, training_loss=Counts())


def steps(model: nn.Module, batches: Any, rules: Any, learning_rate: float) -> float:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = rules.wrap(torch.optim.SGD(parameters, learning_rate)), []
    for inputs, targets in batches:
        optimizer.zero_grad()
        with rules.step(len(targets)):
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses) / len(losses)


def masks(model: nn.Module, *given: Any) -> float:
    next(model.parameters()).register_hook(lambda gradient: gradient * 0.5)
    return steps(model, *given)


def replaces(model: nn.Module, *given: Any) -> float:
    forward = model[1].forward
    model[1].forward = lambda x: 0.9 * forward(x)
    return steps(model, *given)


def freezes(model: nn.Module, *given: Any) -> float:
    loss = steps(model, *given)
    model[0].requires_grad_(False)
    return loss


LOOPS = {"masks": masks, "replaces": replaces, "freezes": freezes}


@pytest.mark.parametrize("method", [FedBN, FedTAN])
@pytest.mark.parametrize("kind", [*STATES, "hook", "loss", *LOOPS])
def test_clients_have_the_bits_of_clients_alone(
    points, same_bits, kind: str, method: type[FedBN]
) -> None:
    """A client alone has a model and a loss that nobody has used."""
    given = {"loop": LOOPS[kind]} if kind in LOOPS else {}
    settings = LocalTraining(
        learning_rate=LearningRate(0.1), local_steps=2, batch_size=4, **given
    )
    make, found = functools.partial(build, kind), []
    task = with_loss() if kind == "loss" else CLASSIFICATION
    for alone in (False, True):

        def client_fn(context: Context, alone: bool = alone) -> TorchClient:
            number = context.node_config["partition-id"]
            data = points(SIZES[number], number)
            return TorchClient(
                functools.partial(make) if alone else make,
                *(data, data, settings),
                context=context,
                task=with_loss() if alone and kind == "loss" else task,
            )

        with InProcessGrid(client_app(client_fn), len(SIZES)) as grid:
            start = to_record(build(kind).state_dict())
            result = method().start(grid=grid, initial_arrays=start, num_rounds=2)
        found.append({name: array.numpy() for name, array in result.arrays.items()})
    same_bits(*found)


def test_attributes_of_parameters_are_copied(points) -> None:
    """Optimizers of a user's loop read them."""
    seen = []

    def make() -> nn.Module:
        model = build("none")
        model[0].weight.decays = False
        return model

    def loop(model: nn.Module, *given: Any) -> float:
        seen.append(model[0].weight.decays)
        return steps(model, *given)

    settings = LocalTraining(learning_rate=LearningRate(0.1), loop=loop)
    data = points(6)
    client = TorchClient(make, data, data, settings, partition_id=0)
    client.fit(client.get_parameters({}), {"server-round": 1})
    assert seen == [False]
