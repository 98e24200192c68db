"""Evaluation has exact means, uses eval mode, and does not change the model."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.tasks import Task

UNTRACKED = partial(nn.BatchNorm1d, track_running_stats=False)


@pytest.mark.parametrize("by_batch", [False, True])
def test_a_test_that_depends_on_its_batches_keeps_their_size(
    points, mlp, by_batch: bool
) -> None:
    """A smaller batch saves memory.

    If BatchNorm normalises by the batch, a smaller batch would change the results.
    """
    data, task = points(22, 2), Task(test_batch=10, plain_test_batch=4)
    model = mlp(kind=UNTRACKED if by_batch else nn.BatchNorm1d)
    result = evaluate(model, data, task=task)
    sizes = [10, 10, 2] if by_batch else [4, 4, 4, 4, 4, 2]
    assert [len(positions) for positions in data.asked] == sizes
    whole = evaluate(model, data, task=Task(test_batch=10))
    assert result.loss == pytest.approx(whole.loss, rel=1e-14)


def test_without_examples_the_metrics_are_nan(points, mlp) -> None:
    result = evaluate(mlp(), points(0))
    assert math.isnan(result.loss)
    assert math.isnan(result.metrics["accuracy"])
    assert result.num_examples == 0


@pytest.mark.parametrize(
    ("layers", "batches"),
    [
        ([nn.Linear(5, 4), UNTRACKED(4)], [4, 5]),
        (
            [
                nn.Unflatten(1, (1, 5, 1)),
                nn.BatchNorm2d(1, track_running_stats=False),
                nn.Flatten(),
            ],
            [4, 4, 1],
        ),
    ],
)
def test_a_last_example_joins_where_a_layer_without_running_statistics_cannot_take_it(
    points, layers, batches
) -> None:
    # The first layer has running statistics.
    model, data = nn.Sequential(nn.BatchNorm1d(5), *layers).double(), points(9)
    result = evaluate(model, data, batch_size=4)
    assert result.num_examples == 9
    assert [len(positions) for positions in data.asked][-len(batches) :] == batches


def test_a_lone_example_is_refused_by_the_layers_name_where_it_has_no_variance(
    points, mlp
) -> None:
    model = mlp(kind=UNTRACKED)
    for data, size in ((points(1), 4), (points(3), 1)):
        with pytest.raises(
            NormLayerError,
            match="layer '1' raised in a batch of 1 examples",
        ):
            evaluate(model, data, batch_size=size)


def test_a_tensor_that_a_model_keeps_from_its_test_serves_the_training(points) -> None:
    class Keeping(nn.Linear):
        kept = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.kept is None:
                self.kept = torch.ones(5, dtype=torch.float64)
            return super().forward(x) * self.kept

    model = Keeping(5, 5).double()
    evaluate(model, points(3))
    model(points(3).inputs).sum().backward()
    assert model.weight.grad is not None
