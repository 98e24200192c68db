"""A client may train with its own loss, but tests use the loss of the task."""

from __future__ import annotations

import dataclasses

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from fedbn_flwr import TorchClient
from fedbn_flwr.training import CLASSIFICATION, LearningRate, LocalTraining


def test_a_client_trains_with_its_own_loss_and_tests_with_that_of_the_task(
    points, mlp
) -> None:
    data, rate = points(12), LearningRate(0.1)
    settings = LocalTraining(learning_rate=rate, local_steps=1, batch_size=0)
    ends, tests = [], []
    for factor in (0.0, 1.0, 2.0):

        def loss(outputs: Tensor, targets: Tensor, factor: float = factor) -> Tensor:
            return factor * F.cross_entropy(outputs, targets)

        task = dataclasses.replace(CLASSIFICATION, training_loss=loss)
        client = TorchClient(mlp(), data, data, settings, partition_id=0, task=task)
        start = client.get_parameters({})
        arrays, _, metrics = client.fit(start, {"server-round": 1})
        ends.append([*arrays, np.asarray(metrics["train-loss"])])
        tests.append(client.evaluate(start, {}))
    for none, once, twice in zip(*ends, strict=True):
        np.testing.assert_allclose(twice - once, once - none, rtol=1e-9, atol=1e-12)
    assert (ends[0][0] != ends[1][0]).all()
    assert tests[0] == tests[1] == tests[2]
