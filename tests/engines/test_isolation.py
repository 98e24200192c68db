"""Changes that training leaves in a model, loop or loss reach no other client.

The layers keep state in objects of drawn kinds, outside the state dict. The bits are
equal with any number of workers, with the sites in another order, and after a resume.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from fedbn_flwr import InProcessGrid, TorchClient, client_app
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.strategies import FedAvg, FedTAN
from fedbn_flwr.training import CLASSIFICATION, LearningRate, LocalTraining
from tests.support.points import Points
from tests.support.user_loops import loop_of_steps

SIZES = (9, 14, 6, 11)


def in_closure(_: nn.Module) -> Callable[[], float]:
    box = {"passes": 0}

    def advance() -> float:
        box["passes"] += 1
        return box["passes"]

    return advance


def _advance_box(box: dict[str, int]) -> float:
    box["passes"] = box.get("passes", 0) + 1
    return box["passes"]


def in_partial(_: nn.Module) -> Callable[[], float]:
    return functools.partial(_advance_box, {})


def in_default(_: nn.Module) -> Callable[[], float]:
    def advance(calls: list[int] = []) -> float:  # noqa: B006
        calls.append(1)
        return len(calls)

    return advance


def in_function(_: nn.Module) -> Callable[[], float]:
    def advance() -> float:
        advance.passes += 1
        return advance.passes

    advance.passes = 0
    return advance


def in_counter(_: nn.Module) -> Callable[[], float]:
    return itertools.count(1).__next__


def of_torch(_: nn.Module) -> Callable[[], float]:
    generator = torch.Generator().manual_seed(3)
    return lambda: torch.rand((), generator=generator).item()


def of_numpy(_: nn.Module) -> Callable[[], float]:
    return np.random.RandomState(3).random_sample


def on_parameter(layer: nn.Module) -> Callable[[], float]:
    def advance() -> float:
        layer.scale.passes.append(1)
        return len(layer.scale.passes)

    layer.scale.passes = []
    return advance


KINDS = (
    in_closure,
    in_partial,
    in_default,
    in_function,
    in_counter,
    of_torch,
    of_numpy,
    on_parameter,
)


class Drifts(nn.Module):
    """A layer whose training passes depend on the number of passes before."""

    def __init__(self, kind: Callable[[nn.Module], Callable[[], float]]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.advance = kind(self)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * (1 + 0.01 * self.advance() * self.training)


def hooked(layer: nn.Module, advance: Callable[[], float]) -> None:
    """Register a forward hook that keeps state."""

    def hook(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        return output + 0.01 * advance() * module.training

    layer.register_forward_hook(hook)


def unfreezes(layer: nn.Module, advance: Callable[[], float]) -> None:
    """Replace a forward pass. The first training pass changes ``requires_grad``."""
    own = layer.forward

    def forward(x: Tensor) -> Tensor:
        if layer.training and advance() > 0:
            layer.weight.requires_grad_(True)
        return own(x)

    layer.weight.requires_grad_(False)
    layer.forward = forward


def counts_classes() -> Callable[[Tensor, Tensor], Tensor]:
    """Return a training loss with state."""
    seen = torch.ones(3, dtype=torch.float64)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.add_(torch.bincount(targets, minlength=3))
        return nn.functional.cross_entropy(outputs + (seen / seen.sum()).log(), targets)

    return loss


def masks(model: nn.Module, *given: Any) -> float:
    """Train with a hook on a parameter, which must have the attributes of the model."""
    assert model[0].bias.decays is False
    model[0].bias.register_hook(lambda gradient: gradient * 0.5)
    return loop_of_steps(model, *given)


def replaces(model: nn.Module, *given: Any) -> float:
    own = model[1].forward
    model[1].forward = lambda x: 0.9 * own(x)
    return loop_of_steps(model, *given)


def freezes(model: nn.Module, *given: Any) -> float:
    loss = loop_of_steps(model, *given)
    model[0].requires_grad_(False)
    return loss


LOOPS = {"masks": masks, "replaces": replaces, "freezes": freezes}


def net(kinds: list[Any], way: str) -> nn.Module:
    first = nn.Linear(5, 4)
    layers: list[nn.Module] = [weight_norm(first) if way == "parametrized" else first]
    layers.append(nn.BatchNorm1d(4))
    layers += [Drifts(kind) for kind in kinds]
    model = nn.Sequential(*layers, nn.Linear(4, 3)).double()
    model[0].bias.decays = False
    if way == "hook":
        hooked(model[1], kinds[0](model[2]))
    if way == "replaced":
        unfreezes(model[0], kinds[0](model[2]))
    return model


def law(kinds: list[Any], way: str, method: Any, many_workers: int) -> None:
    settings = LocalTraining(
        learning_rate=LearningRate(0.05),
        local_steps=2,
        batch_size=4,
        loop=LOOPS.get(way),
    )
    build = functools.partial(net, kinds, way)
    task = CLASSIFICATION
    if way == "loss":
        task = dataclasses.replace(task, training_loss=counts_classes())
    data = []
    for number, size in enumerate(SIZES):
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64)
        data.append(Points(inputs, torch.arange(size) % 3))

    def client_fn(context: Any) -> TorchClient:
        own = data[context.node_config["partition-id"]]
        return TorchClient(build, own, own, settings, context=context, task=task)

    torch.manual_seed(0)
    start = to_record(build().state_dict())

    def run(workers: int, seed: int, resumed: bool = False) -> dict[str, Any]:
        arrays, saved = start, None
        for last in (1, 2) if resumed else (2,):
            strategy = method(fraction_evaluate=0.0)
            if saved is not None:
                strategy.load_state_dict(saved, last - 1)
            grid = InProcessGrid(
                client_app(client_fn), len(SIZES), workers=workers, seed=seed
            )
            with grid:
                arrays = strategy.start(grid, arrays, num_rounds=last).arrays
            saved = strategy.state_dict()
        return from_record(arrays)

    alone = run(0, seed=1)
    for other in (run(0, seed=2), run(0, seed=3, resumed=True), run(many_workers, 4)):
        for name, array in alone.items():
            assert array.tobytes() == other[name].tobytes(), name


WAYS = ("plain", "hook", "replaced", "parametrized", "loss", *LOOPS)
drawn = {
    "kinds": st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    "way": st.sampled_from(WAYS),
    "method": st.sampled_from([FedAvg, FedTAN]),
}


@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@example(kinds=list(KINDS), way="hook", method=FedAvg)
@example(kinds=[in_closure], way="loss", method=FedTAN)
@example(kinds=[of_torch], way="parametrized", method=FedAvg)
@example(kinds=[in_function], way="masks", method=FedTAN)
@example(kinds=[of_numpy], way="replaces", method=FedAvg)
@example(kinds=[in_counter], way="freezes", method=FedAvg)
@given(**drawn)
def test_clients_share_nothing_that_a_model_keeps(
    kinds: list[Any], way: str, method: Any
) -> None:
    law(kinds, way, method, many_workers=2)


@pytest.mark.slow
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(**drawn)
def test_more_draws_with_four_workers(kinds: list[Any], way: str, method: Any) -> None:
    law(kinds, way, method, many_workers=4)
