"""Nothing that training leaves in a model, loop or loss reaches another client."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from flwr.app import Context
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import InProcessGrid, TorchClient, client_app
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.strategies import FedBN, FedTAN
from fedbn_flwr.training import CLASSIFICATION, LearningRate, LocalTraining, Task
from tests.support.own_state import STATES, Keeps

SIZES = (6, 13, 9)


def build(kind: str) -> nn.Module:
    layer = Keeps(kind, 4) if kind in STATES else nn.Identity()
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
    """Without others, a client has a model and a loss that nobody has used."""
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
