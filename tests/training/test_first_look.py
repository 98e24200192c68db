"""The first look at a model finds entries made in a pass and wrong last layers.

A wrong last layer is a sigmoid or softmax before a loss of logits.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fedbn_flwr.client import TorchClient
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.records import to_state
from fedbn_flwr.training import (
    BINARY,
    CLASSIFICATION,
    MULTI_LABEL,
    REGRESSION,
    SEGMENTATION,
    LearningRate,
    LocalTraining,
    Task,
)
from fedbn_flwr.training.run_memory import memory_of_run
from tests.support.points import Points
from tests.support.strange_layers import Made


class MadeBuffer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", x.detach().mean(0))
        return super().forward(x)


class Grows(nn.BatchNorm1d):
    """A layer whose table gets the length of the inputs."""

    def __init__(self) -> None:
        super().__init__(5)
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.table = x.new_zeros(x.shape[1])
        return super().forward(x + self.table)


class Later(nn.BatchNorm1d):
    """A layer that makes a scale in a later pass, in training or in eval mode."""

    def __init__(self, passes: int, training: bool, lock: bool = False) -> None:
        super().__init__(5)
        self.passes, self.wanted = passes, training
        self.lock = threading.Lock() if lock else None

    def forward(self, x: Tensor) -> Tensor:
        self.passes -= self.training is self.wanted
        if not self.passes:
            self.scale = nn.Parameter(torch.ones(1, dtype=x.dtype))
        return super().forward(x)


class Ends(nn.Module):
    def __init__(self, columns: int, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.out, self.end = nn.BatchNorm1d(5), nn.Linear(5, columns), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.out(self.norm(x)))


def client(model: nn.Module, data: Points, task: Task = CLASSIFICATION) -> TorchClient:
    rate = LearningRate(0.1)
    return TorchClient(
        model,
        data,
        data,
        LocalTraining(learning_rate=rate, batch_size=4),
        partition_id=0,
        task=task,
    )


@pytest.fixture(autouse=True)
def _new_run() -> Iterator[None]:
    with memory_of_run():
        yield


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (lambda: Made(nn.BatchNorm1d), "made.weight"),
        (lambda: Made(lambda n: nn.Linear(n, 3)), "made.weight"),
        (
            lambda: nn.Sequential(nn.BatchNorm1d(5), Made(nn.BatchNorm1d)),
            "1.made.weight",
        ),
        (lambda: MadeBuffer(5, 3), "seen"),
        (Grows, "table"),
        (lambda: Later(1, training=False), "scale"),
        (lambda: Later(2, training=True), "scale"),
        (lambda: Later(1, training=True, lock=True), "scale"),
    ],
)
def test_entries_that_a_pass_makes_are_refused_by_name(points, model, name) -> None:
    """The entries may differ in shape or appear in eval mode or after some steps.

    A new model in the next round is refused as well.
    """
    data = points(9)
    for server_round in (1, 2):
        one = client(model().double(), data)
        with pytest.raises(ConfigError, match=f"'{name}'"):
            one.fit(one.get_parameters({}), {"server-round": server_round})


def test_what_is_refused_before_a_step_has_trained_nothing(points) -> None:
    net, data = Made(nn.BatchNorm1d).double(), points(9)
    one = client(net, data)
    for server_round in (1, 2):
        with pytest.raises(ConfigError):
            one.fit(one.get_parameters({}), {"server-round": server_round})
    assert "made.weight" not in net.state_dict()


def test_what_is_no_entry_may_be_made_in_a_pass(points) -> None:
    class Cache(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            self.register_buffer("cosines", x.cos().detach(), persistent=False)
            return super().forward(x)

    one = client(Cache(5).double(), points(9))
    one.fit(one.get_parameters({}), {"server-round": 1})


def of_probabilities(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy(outputs, targets.view_as(outputs))


class InTests(nn.Module):
    """A sigmoid in eval mode only."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x.sigmoid()


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.nll_loss(outputs.log(), targets)


@pytest.mark.parametrize(
    ("task", "columns", "end", "told"),
    [
        (BINARY, 1, torch.sigmoid, "sigmoid"),
        (MULTI_LABEL, 4, nn.Sigmoid(), "sigmoid"),
        (MULTI_LABEL, 4, torch.relu, ""),
        (MULTI_LABEL, 4, lambda z: z.sigmoid().clamp(1e-6, 1 - 1e-6), "sigmoid"),
        (
            MULTI_LABEL,
            4,
            lambda z: checkpoint(torch.sigmoid, z, use_reentrant=False),
            "sigmoid",
        ),
        (BINARY, 1, InTests(), "sigmoid"),
        (BINARY, 1, nn.Hardsigmoid(), "sigmoid"),
        (BINARY, 1, lambda z: (z.tanh() + 1) / 2, "sigmoid"),
        (BINARY, 1, nn.LogSigmoid(), "log-sigmoid"),
        (BINARY, 1, torch.tanh, ""),
        (
            dataclasses.replace(BINARY, loss=of_probabilities),
            1,
            nn.Sigmoid(),
            "sigmoid",
        ),
        (CLASSIFICATION, 3, lambda z: -z.square(), ""),
        (CLASSIFICATION, 3, nn.Softmax(1), "softmax"),
        (CLASSIFICATION, 3, lambda z: z.exp() / z.exp().sum(1, True), "softmax"),
        (CLASSIFICATION, 3, torch.sigmoid, "sigmoid"),
        (CLASSIFICATION, 3, nn.LogSoftmax(1), ""),
        (CLASSIFICATION, 3, lambda z: 5 * torch.sigmoid(z) - 2, ""),
        (REGRESSION, 1, torch.sigmoid, ""),
        (
            Task(training_loss=partial(F.cross_entropy, label_smoothing=0.1)),
            3,
            nn.Softmax(1),
            "softmax",
        ),
        (Task(loss=own_loss), 3, nn.Softmax(1), ""),
        (Task(loss=lambda z, t: F.cross_entropy(z, t)), 3, nn.Softmax(1), "softmax"),
        (SEGMENTATION, 12, lambda z: z.view(-1, 3, 2, 2).softmax(1), "softmax"),
    ],
)
def test_a_sigmoid_or_softmax_before_a_loss_of_logits_is_warned_of_once(
    caplog, task: Task, columns: int, end: Callable[[Tensor], Tensor], told: str
) -> None:
    """A client warns under every task, even if code hides the function.

    A model with outputs that are by chance between 0 and 1 gets no warning.
    """
    torch.manual_seed(0)
    model = Ends(columns, end).double()
    with torch.no_grad():
        model.out.bias.fill_(0.4)
        model.out.weight.mul_(0.01)
    inputs = torch.randn(9, 5, dtype=torch.float64)
    targets = torch.zeros_like(model(inputs))
    if task.by_pixel:
        targets = torch.zeros(9, 2, 2, dtype=torch.int64)
    elif isinstance(task, type(CLASSIFICATION)) and type(task) is Task:
        targets = torch.zeros(9, dtype=torch.int64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one = client(model, Points(inputs, targets), task)
    for server_round in (1, 2):
        state = list(to_state(before).values())
        one.fit(state, {"server-round": server_round})
    found = [text for text in caplog.messages if "sigmoid" in text or "softmax" in text]
    assert len(found) == bool(told)
    assert all(told in text for text in found)
