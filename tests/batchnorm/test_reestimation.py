"""Merged statistics are exact, and every layer has the values of plain passes.

The model does not change.
"""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedbn_flwr.batchnorm import reestimation
from fedbn_flwr.batchnorm.adaptation import evaluate_adapted
from fedbn_flwr.batchnorm.calibration import calibrate
from fedbn_flwr.batchnorm.reestimation import (
    MomentSums,
    merge,
    moments_of,
    reestimate_statistics,
)
from fedbn_flwr.batchnorm.sync import try_synchronised_step
from fedbn_flwr.doctor import diagnose
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.training.borrowed import lending
from fedbn_flwr.training.single_examples import takes_one_example
from fedbn_flwr.training.tasks import CLASSIFICATION
from tests.support.strange_layers import Ghost, OwnSums, WithReLU, others_move


def test_a_layer_at_two_paths_has_the_moments_of_both_calls_at_both(points) -> None:
    layer = nn.BatchNorm1d(5).double()
    found = reestimate_statistics(nn.Sequential(layer, layer), points(9), batch_size=0)
    assert [(path, one.count) for path, one in found.items()] == [("0", 18), ("1", 18)]


@pytest.mark.parametrize("kind", [Ghost, WithReLU, OwnSums])
def test_a_layer_is_measured_where_it_calls_batch_norm(kind, points, mlp) -> None:
    def measured(kind: type[nn.Module]):
        return reestimate_statistics(mlp(kind=kind), points(8), batch_size=8)["1"]

    if kind is OwnSums:
        with pytest.raises(NormLayerError, match=r"'1' \(OwnSums\) does not call"):
            measured(kind)
        return
    ours, wanted = measured(kind), measured(nn.BatchNorm1d)
    assert ours.count == wanted.count
    torch.testing.assert_close((ours.mean, ours.m2), (wanted.mean, wanted.m2))


def test_a_layer_that_a_model_in_train_mode_has_in_eval_mode_is_left_out(
    points,
) -> None:
    """A model in eval mode as a whole reveals nothing about its layers."""
    model = nn.Sequential(nn.BatchNorm1d(5), nn.BatchNorm1d(5)).double().train()
    model[0].running_mean += 1
    model[0].eval()
    measure = partial(reestimate_statistics, model, points(9), batch_size=4)
    found = measure()
    assert found.keys() == {"1"}
    given = points(9).inputs - model[0].running_mean
    torch.testing.assert_close(found["1"].mean, (given / (1 + 1e-5) ** 0.5).mean(0))
    model.eval()
    assert measure().keys() == {"0", "1"}


PASSES = {
    "re-estimation": lambda model, data: reestimate_statistics(
        model, data, batch_size=4
    ),
    "one example": lambda model, data: takes_one_example(
        model, data.inputs[:1], None, lending(model, CLASSIFICATION)
    ),
    "synchronised step": lambda model, data: try_synchronised_step(
        model, data.inputs[:2], 2
    ),
    "test with batch statistics": lambda model, data: evaluate_adapted(
        model, data, "batch"
    ),
    "test with mixed statistics": lambda model, data: evaluate_adapted(
        model, data, "mix"
    ),
    "calibration": lambda model, data: calibrate(model, [data.inputs]),
    "doctor": lambda model, data: diagnose(
        model, [DataLoader(TensorDataset(data.inputs, data.targets), 4)] * 3
    ),
}


@pytest.mark.parametrize("measure", PASSES.values(), ids=PASSES)
def test_a_pass_that_measures_changes_nothing_in_other_layers(points, measure) -> None:
    """Each tensor, number and container is the same object with equal bits."""
    model, data = others_move().train(), points(9)
    before, state = copy.deepcopy(model), torch.get_rng_state()
    tensors = tensors_of(model)
    measure(model, data)
    now = tensors_of(model)
    for name, value in tensors_of(before).items():
        assert now[name] is tensors[name], name
        assert torch.equal(now[name], value), name
    assert torch.equal(model.average, before.average)
    assert (model.passes, modes(model)) == (before.passes, modes(before))
    assert model.sizes == before.sizes
    assert torch.equal(torch.get_rng_state(), state)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def modes(model: nn.Module) -> list[tuple[bool, bool | None]]:
    return [
        (module.training, getattr(module, "track_running_stats", None))
        for module in model.modules()
    ]


@pytest.mark.parametrize(
    ("size", "batch", "asked"),
    [
        (9, 4, [[0, 1, 2, 3], [4, 5, 6, 7, 8]]),
        (7, 1, [[0, 1], [2, 3], [4, 5, 6]]),
        (1, 4, []),
        (0, 4, []),
    ],
)
def test_batches_are_in_order_and_a_single_last_example_joins_one(
    points, mlp, size: int, batch: int, asked: list[list[int]]
) -> None:
    """BatchNorm1d cannot take one example, but BatchNorm2d can."""
    data = points(size)
    found = reestimate_statistics(mlp(), data, batch_size=batch)
    assert [(path, one.count) for path, one in found.items()] == (
        [("1", size)] * bool(asked)
    )
    assert data.asked[len(data.asked) - len(asked) :] == asked
    conv = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).double()
    images = points(5, shape=(1, 6, 6))
    assert reestimate_statistics(conv, images, batch_size=4)["1"].count == 5 * 16
    assert images.asked[-2:] == [[0, 1, 2, 3], [4]]


def test_dropout_draws_from_its_own_seed(points) -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(5)).double()
    first, same, other = (
        reestimate_statistics(model, points(9, 1), batch_size=4, seed=seed)["1"].mean
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 3), (5, 3, 4), (5, 3, 4, 2), (5, 3, 2, 2, 2)])
def test_moments_in_blocks_are_those_of_all_values(
    monkeypatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """This covers each dimension and memory format, and the input does not change."""
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 3).to(dtype)
    layouts = [x]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if x.dim() in formats:
        layouts.append(x.contiguous(memory_format=formats[x.dim()]))
    channels = x.double().transpose(0, 1).flatten(1)
    for values in layouts:
        # all examples together, two examples, less than one example
        for block in (1 << 18, x[:2].numel(), 1):
            monkeypatch.setattr(reestimation, "_BLOCK", block)
            before, found = values.clone(), moments_of(values)
            assert torch.equal(values, before)
            assert found.count == channels.shape[1]
            torch.testing.assert_close(found.mean, channels.mean(1), rtol=1e-14, atol=0)
            torch.testing.assert_close(
                found.m2, channels.var(1) * (found.count - 1), rtol=1e-13, atol=0
            )


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    offset=st.sampled_from([0.0, 1e4, 1e8]),
    seed=st.integers(0, 9),
)
def test_merged_moments_are_those_of_all_values(
    sizes: list[int], offset: float, seed: int
) -> None:
    """At an offset of 1e8, E[x^2] - E[x]^2 would lose all digits.

    There are more calls than kept moments, so sums merge moments in between.
    """
    values = np.random.default_rng(seed).normal(size=(sum(sizes), 3)) + offset
    parts = [torch.from_numpy(x) for x in np.split(values, np.cumsum(sizes)[:-1])]
    sums = MomentSums()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reestimation, "_KEPT", 2)
        for part in parts:
            sums.gather("0", part)
            assert len(sums._moments["0"]) < 3
    centred = (values - offset).astype(np.longdouble)
    mean = centred.mean(0)
    m2 = ((centred - mean) ** 2).sum(0).astype(float)
    rtol = 1e-6 if offset > 1e6 else 1e-9
    for total in (merge([moments_of(part) for part in parts]), sums.merged()["0"]):
        assert total.count == len(values)
        # a mean is as exact as float64 at the offset
        np.testing.assert_allclose(
            total.mean - offset, mean.astype(float), atol=1.6e-14 * max(offset, 1)
        )
        np.testing.assert_allclose(total.m2, m2, rtol=rtol, atol=1e-12)
