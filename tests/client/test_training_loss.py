"""A client's own loss of training: tests have that of the task, and BatchNorm's
statistics do not know of it.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import TorchClient
from fedbn_flwr.training import CLASSIFICATION, LearningRate, LocalTraining

WEIGHTS = (0.25, 1.0, 3.5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = (
            nn.Linear(5, 4),
            nn.BatchNorm1d(4),
            nn.Linear(4, 3),
        )
        self.double()  # as the points are

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


def test_a_client_trains_with_its_own_loss_and_tests_with_that_of_the_task(
    points,
) -> None:
    data = points(12, classes=3)
    settings = LocalTraining(
        learning_rate=LearningRate(0.1), local_steps=1, batch_size=0
    )
    loss = functools.partial(
        F.cross_entropy, weight=torch.tensor(WEIGHTS, dtype=torch.float64)
    )
    task = dataclasses.replace(CLASSIFICATION, training_loss=loss)
    client = TorchClient(Net(), data, data, settings, partition_id=0, seed=0, task=task)
    start = client.get_parameters({})
    plain = TorchClient(Net(), data, data, settings, partition_id=0, seed=0)
    arrays, _, metrics = client.fit(start, {"server-round": 1})
    inputs, targets = data.batch(torch.arange(12))
    model = Net()
    torch_loss = F.cross_entropy(
        model(inputs), targets, torch.tensor(WEIGHTS, dtype=torch.float64)
    )
    torch_loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    assert metrics["train-loss"] == pytest.approx(torch_loss.item())
    of_plain = plain.fit(start, {"server-round": 1})[0]
    for array, (name, expected), unweighted in zip(
        arrays, model.state_dict().items(), of_plain, strict=True
    ):
        np.testing.assert_allclose(array, expected.numpy(), rtol=1e-5, atol=1e-7)
        if "running" in name or "tracked" in name:
            # BatchNorm's statistics know no weights
            assert np.array_equal(array, unweighted)
    assert client.evaluate(start, {}) == plain.evaluate(start, {})
