"""Laws of test-time BatchNorm on BatchNorm1d, 2d and 3d."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.adaptation import (
    PRIOR,
    TEST_BN_MODES,
    adapted,
    evaluate_adapted,
)
from fedbn_flwr.batchnorm.reestimation import moments_of
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.freezing import force_eval
from fedbn_flwr.training.tasks import CLASSIFICATION, Task
from tests.support.strange_layers import OwnSums, WithReLU


def batches_of(size: int) -> Task:
    """Return the task with test batches of this size."""
    return replace(CLASSIFICATION, test_batch=size)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(3), (6, 3)),
        (nn.BatchNorm1d(3, affine=False), (6, 3, 4)),
        (nn.BatchNorm2d(3), (6, 3, 2, 2)),
        (nn.BatchNorm3d(3), (6, 3, 2, 2, 2)),
        (nn.BatchNorm2d(3, track_running_stats=False), (6, 3, 2, 2)),
    ],
)
@pytest.mark.parametrize("mode", ["batch", "mix"])
@pytest.mark.parametrize("kept_in_eval", [False, True])
def test_a_layer_of_every_kind_against_numbers_by_hand(
    layer: nn.Module, shape: tuple[int, ...], mode, kept_in_eval: bool
) -> None:
    """The oracle uses one batch of all data.

    It uses only the batch's statistics, or 6 parts of them to 16 parts of the stored
    statistics. The variances are biased. Unbiased variances, used by the public code of
    ``mix``, give other outputs. Dropout does not act, and a layer that training keeps
    in eval mode is adapted.
    """
    model = nn.Sequential(copy.deepcopy(layer), nn.Dropout(0.5))
    # Without affine, the model has no other parameter.
    model.register_parameter("other", nn.Parameter(torch.zeros(())))
    model.double().train()
    if kept_in_eval:
        force_eval(model[0])
    x = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(0)).double() + 1
    own = moments_of(x)
    stored = mode == "mix" and layer.track_running_stats
    w = 16 / (16 + 6) if stored else 0.0
    mean, var = (1 - w) * own.mean, w * 1 + (1 - w) * own.m2 / own.count
    rows = x.movedim(1, -1)
    expected = ((rows - mean) / (var + 1e-5).sqrt()).movedim(-1, 1)
    tested = adapted(model, mode)
    for _ in range(2):  # a batch does not see the batches before it
        with torch.no_grad():
            found = tested(x)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    assert model[0].track_running_stats == layer.track_running_stats


def test_a_test_with_batch_statistics_is_one_without_running_statistics(
    mlp, points
) -> None:
    model, data = mlp(), points(10, 1)
    found = evaluate_adapted(model, data, "batch", batches_of(5))
    plain = mlp(kind=partial(nn.BatchNorm1d, track_running_stats=False))
    assert found.loss == evaluate(plain, data, batch_size=5).loss, "bit for bit"
    assert found.loss != evaluate(model, data, batch_size=5).loss
    assert evaluate_adapted(model, data, "").loss == evaluate(model, data).loss


@pytest.mark.parametrize("mode", TEST_BN_MODES)
def test_a_last_batch_of_one_example_joins_the_batch_before_it(
    mlp, points, mode
) -> None:
    """One layer has no running statistics, so it refuses a batch of one example."""
    layers = [nn.BatchNorm1d(5, track_running_stats=False), *mlp()]
    model, data = nn.Sequential(*layers).double(), points(11, 1)
    tested = adapted(model, mode)
    with torch.no_grad():
        outputs = torch.cat([tested(x) for x in data.inputs.split([5, 6])])
    wanted = nn.functional.cross_entropy(outputs, data.targets)
    found = evaluate_adapted(model, data, mode, batches_of(5)).loss
    assert found == pytest.approx(float(wanted), rel=1e-12)


def test_a_compiled_model_that_was_called_before_is_adapted_as_the_plain_one(
    mlp, points
) -> None:
    torch._dynamo.reset()
    model, data = mlp(), points(10, 1)
    compiled = torch.compile(model, backend="eager")
    plain = evaluate(compiled, data, batch_size=5)  # of the size that follows
    for mode in TEST_BN_MODES:
        found = evaluate_adapted(compiled, data, mode, batches_of(5)).loss
        wanted = evaluate_adapted(model, data, mode, batches_of(5)).loss
        assert found == pytest.approx(wanted, rel=1e-12)
        assert found != pytest.approx(plain.loss, rel=1e-3)
        part = evaluate_adapted(nn.Sequential(compiled), data, mode, batches_of(5))
        assert part.loss == pytest.approx(wanted, rel=1e-12)


class Rows(nn.Module):
    """A network whose layer gets the examples (N, T, 5), or a row for each time."""

    def __init__(self, norm: nn.Module, folds: bool) -> None:
        super().__init__()
        self.norm, self.folds = norm, folds

    def forward(self, x: Tensor) -> Tensor:
        if self.folds:
            return self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2]).sum(1)
        return self.norm(x.transpose(1, 2)).sum(2)


@pytest.mark.parametrize("by_name", [False, True])
def test_mix_counts_examples_whatever_the_rows_of_a_layer_are(by_name: bool) -> None:
    x = torch.rand(8, 50, 5).double() * 2 + 1
    layer = nn.BatchNorm1d(5).double()
    share = PRIOR / (PRIOR + 8)
    wanted = copy.deepcopy(layer).eval()
    mean, var = x.mean((0, 1)), x.var((0, 1), correction=0)
    wanted.running_mean = (1 - share) * mean
    wanted.running_var = share + (1 - share) * var
    for folds in (False, True):
        model = adapted(Rows(layer, folds), "mix")
        ours = model(x=x) if by_name else model(x)
        torch.testing.assert_close(ours, Rows(wanted, folds)(x))


@pytest.mark.parametrize("mode", TEST_BN_MODES)
def test_batchnorm_with_an_activation_inside_is_adapted(mode, mlp, points) -> None:
    x = points(8).inputs
    ours = adapted(mlp(kind=WithReLU), mode)(x)
    assert torch.equal(ours, adapted(mlp(), mode)(x))
    model = adapted(mlp(kind=OwnSums), "mix")
    with pytest.raises(NormLayerError, match=r"layer '1' \(OwnSums\) does not call"):
        model(x)
