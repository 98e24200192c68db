"""Test-time BatchNorm: its laws on a torchvision model and on BatchNorm1d, 2d and 3d."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.adaptation import TestBN, adapted, evaluate_adapted, try_batches
from fedbn_flwr.batchnorm.reestimation import moments_of
from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.training.evaluation import evaluate, without_running_statistics
from fedbn_flwr.training.freezing import hold_eval

IMAGES = (3, 32, 32)


def outputs(model: nn.Module, data: Any, by: TestBN | None, batch: int) -> Tensor:
    """The outputs of a test over all data, batch after batch."""
    model.eval()
    parts = torch.arange(len(data)).split(batch)
    with torch.no_grad():
        if by is None:
            return torch.cat([model(data.batch(part)[0]) for part in parts])
        with adapted(model, data, by):
            return torch.cat([model(data.batch(part)[0]) for part in parts])


def in_train_mode(model: nn.Module, data: Any, batch: int) -> Tensor:
    """The outputs with each batch's own statistics, by torch's own training mode."""
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    model.eval()
    for layer in layers:
        layer.train()
        layer.momentum = 0.0
    with torch.no_grad():
        found = torch.cat([model(data.batch(part)[0]) for part in torch.arange(len(data)).split(batch)])
    model.eval()
    return found


@pytest.fixture
def trained(torchvision_net: Any, points: Any) -> tuple[nn.Module, Any]:
    """A model whose running statistics are not those of the data."""
    model, data = torchvision_net(), points(10, 1, IMAGES)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(generator=torch.Generator().manual_seed(0))
            module.running_var.uniform_(0.5, 2, generator=torch.Generator().manual_seed(1))
    return model, data


CLOSE = {"rtol": 1e-13, "atol": 1e-13}


def test_batch_is_the_batchs_own_statistics_and_mix_without_weight_is_batch(trained: Any) -> None:
    model, data = trained
    batch = outputs(model, data, TestBN("batch"), 4)
    torch.testing.assert_close(batch, in_train_mode(model, data, 4), **CLOSE)
    for none in (TestBN("mix", prior=0.0), TestBN("mix", alpha=0.0), TestBN("momentum", tau=0.0)):
        torch.testing.assert_close(outputs(model, data, none, 4), batch, **CLOSE)
    assert not torch.allclose(batch, outputs(model, data, None, 4), atol=1e-3)


def test_mix_with_all_weight_is_the_plain_test_bit_for_bit(trained: Any) -> None:
    model, data = trained
    assert torch.equal(outputs(model, data, TestBN("mix", alpha=1.0), 4), outputs(model, data, None, 4))


def test_one_batch_of_everything_is_the_same_in_three_modes(trained: Any) -> None:
    model, data = trained
    batch = outputs(model, data, TestBN("batch"), len(data))
    for other in (TestBN("momentum"), TestBN("full")):
        torch.testing.assert_close(outputs(model, data, other, len(data)), batch, **CLOSE)


def test_only_batchnorm_passes_the_data_otherwise_than_in_eval_mode(points: Any) -> None:
    """Dropout does not act in any mode, and a layer that training keeps in eval mode is adapted in all of them."""
    layers = [nn.Linear(5, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)]
    model, data = nn.Sequential(*layers).double(), points(9)
    hold_eval(model[2])
    batch = outputs(model, data, TestBN("batch"), len(data))
    assert not torch.allclose(batch, outputs(model, data, None, len(data)), atol=1e-2)
    model.train()
    modes = [module.training for module in model.modules()]
    for other in (TestBN("momentum"), TestBN("full"), TestBN("mix", prior=0.0)):
        torch.testing.assert_close(outputs(model, data, other, len(data)), batch, **CLOSE)
        model.train()
    with adapted(model, data, TestBN("full")):
        assert [module.training for module in model.modules()] == modes
    assert all(layer.track_running_stats for layer in (model[2], model[4]))


def test_the_order_of_the_batches_matters_to_momentum_alone(trained: Any) -> None:
    model, data = trained
    turned = type(data)(data.inputs.flip(0), data.targets.flip(0))
    for by, same in ((TestBN("momentum"), False), (TestBN("mix"), True), (TestBN("momentum", tau=0.0), True)):
        forth, back = outputs(model, data, by, 5), outputs(model, turned, by, 5).flip(0)
        assert torch.allclose(forth, back, atol=1e-9) == same


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(3), (6, 3)),
        (nn.BatchNorm1d(3, affine=False), (6, 3, 4)),
        (nn.BatchNorm2d(3), (6, 3, 2, 2)),
        (nn.BatchNorm3d(3), (6, 3, 2, 2, 2)),
    ],
)
@pytest.mark.parametrize("mode", ["batch", "mix", "momentum", "full"])
def test_a_layer_of_every_kind_against_numbers_by_hand(layer: nn.Module, shape: tuple[int, ...], mode: Any) -> None:
    """Over one batch of everything: with all of its own statistics, or with 6 parts of them to 16 of the stored ones.

    The variances are biased; with unbiased ones, as the public code of ``mix`` has them, the outputs are elsewhere.
    """
    model = nn.Sequential(layer)
    model.register_parameter("other", nn.Parameter(torch.zeros(())))  # without affine there is none else
    model.double().eval()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1
    own = moments_of(x)
    w = 16 / (16 + 6) if mode == "mix" else 0.0
    column = (1, 3, *[1] * (len(shape) - 2))

    def expected(count: int) -> Tensor:
        mean, var = (1 - w) * own.mean, w * 1 + (1 - w) * own.m2 / count
        return (x - mean.view(column)) / (var.view(column) + 1e-5).sqrt()

    with torch.no_grad(), adapted(model, All(x), TestBN(mode)):
        torch.testing.assert_close(model(x), expected(own.count), rtol=1e-13, atol=1e-13)
    if own.count == 6:
        assert (expected(own.count) - expected(own.count - 1)).abs().max() > 0.05


class All:
    """All examples in one batch, without targets that matter."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        return self.x[positions], positions


@pytest.mark.parametrize("mode", ["batch", "mix", "momentum", "full"])
def test_a_model_in_bfloat16_has_the_outputs_of_the_wide_one(trained: Any, mode: Any) -> None:
    model, data = trained
    wide = outputs(model, data, TestBN(mode), 5)
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    small = type(data)(data.inputs.to(torch.bfloat16), data.targets)
    found = outputs(narrow, small, TestBN(mode), 5)
    assert found.dtype == torch.bfloat16
    off = (found.double() - wide).abs().mean()
    assert off < 0.1 * (outputs(model, data, None, 5) - wide).abs().mean(), "rounding alone"


def test_momentum_follows_the_batches(points: Any) -> None:
    model, data = nn.Sequential(nn.BatchNorm1d(5)).double(), points(9, 2)
    found = outputs(model, data, TestBN("momentum", tau=0.75), 3)
    mean = var = None
    for first in (0, 3, 6):
        own = moments_of(data.inputs[first : first + 3])
        biased = own.m2 / own.count
        mean = own.mean if mean is None else 0.75 * mean + 0.25 * own.mean
        var = biased if var is None else 0.75 * var + 0.25 * biased
        expected = (data.inputs[first : first + 3] - mean) / (var + 1e-5).sqrt()
        torch.testing.assert_close(found[first : first + 3], expected, rtol=1e-12, atol=1e-12)


def test_momentum_sees_each_batch_once(points: Any) -> None:
    """Also where a layer without running statistics makes a last example alone a question."""
    seen: list[int] = []
    model = nn.Sequential(nn.Unflatten(1, (5, 1, 1)), nn.Upsample(2), nn.BatchNorm2d(5, track_running_stats=False))
    model.extend([nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(20, 3)])
    model[3].register_forward_hook(lambda layer, args, output: seen.append(len(output)))
    evaluate_adapted(model.double(), points(9, 2), TestBN("momentum", batch_size=4))
    assert seen == [4, 4, 1]


@pytest.mark.parametrize("by", [TestBN("batch"), TestBN("mix"), TestBN("momentum"), TestBN("full")])
def test_the_model_is_restored_bit_for_bit_also_after_an_error(trained: Any, by: TestBN) -> None:
    model, data = trained
    before = {name: value.clone() for name, value in model.state_dict().items()}
    places = {name: value.data_ptr() for name, value in model.state_dict().items()}
    evaluate_in = outputs(model, data, by, 5)
    assert evaluate_in.isfinite().all()

    def fails() -> None:
        with adapted(model, data, by):
            model(data.batch(torch.arange(4))[0])
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fails()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == places
    assert not any(module._forward_pre_hooks or "forward" in vars(module) for module in model.modules())


def test_a_test_in_the_block_uses_them(trained: Any) -> None:
    model, data = trained
    with adapted(model, data, TestBN("batch")):
        found = evaluate(model, data, batch_size=5)
    with without_running_statistics(model):
        assert found.loss == evaluate(model, data, batch_size=5).loss, "bit for bit"
    again = evaluate_adapted(model, data, TestBN("batch", batch_size=5))
    assert again.loss == found.loss != evaluate(model, data, batch_size=5).loss
    assert evaluate_adapted(model, data, None).loss == evaluate(model, data).loss
    full = evaluate_adapted(model, data, TestBN("full"))
    with adapted(model, data, TestBN("full")):
        assert full.loss == evaluate(model, data).loss


def test_a_compiled_model_that_was_called_before_is_adapted_as_the_plain_one(mlp: Any, points: Any) -> None:
    torch._dynamo.reset()
    model, data = mlp(), points(10, 1)
    compiled = torch.compile(model, backend="eager")
    plain = evaluate(compiled, data, batch_size=5)  # batches of the size that follows
    for mode in ("batch", "mix", "momentum", "full"):
        by = TestBN(mode, batch_size=5)
        found = evaluate_adapted(compiled, data, by)
        assert found.loss == pytest.approx(evaluate_adapted(model, data, by).loss, rel=1e-12)
        assert found.loss != pytest.approx(plain.loss, rel=1e-3)
        with adapted(compiled, data, by):
            assert evaluate(compiled, data, batch_size=5).loss == pytest.approx(found.loss, rel=1e-12)


def test_a_batch_of_one_is_refused_by_the_layers_name_where_nothing_is_mixed(points: Any) -> None:
    model, data = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double(), points(3)
    for by in (TestBN("batch"), TestBN("momentum")):
        with pytest.raises(NormLayerError, match="layer '1' gets one value per channel"):
            outputs(model, data, by, 1)
        with pytest.raises(NormLayerError, match="layer '1' gets one value per channel"):
            try_batches(model, data, replace(by, batch_size=1))
    assert outputs(model, data, TestBN("mix"), 1).isfinite().all()
    with pytest.raises(NormLayerError, match="layer '1' gets one value per channel"):
        try_batches(model, data, TestBN("batch", batch_size=2))
    with pytest.raises(NormLayerError, match="layer '1' gets one value per channel"):
        evaluate_adapted(model, data, TestBN("batch", batch_size=2))
    model.train()
    for fits in (TestBN("momentum", batch_size=2), TestBN("batch"), TestBN("mix", batch_size=1), None):
        try_batches(model, data, fits)
    try_batches(model, points(0), TestBN("batch"))
    assert model.training, "the mode is that of before"


def test_momentum_without_memory_refuses_every_batch_of_one(points: Any) -> None:
    model, data = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double(), points(3)
    assert outputs(model, data, TestBN("momentum"), 2).isfinite().all(), "the batches before give a variance"
    with pytest.raises(NormLayerError, match="layer '1' gets one value per channel"):
        outputs(model, data, TestBN("momentum", tau=0.0), 2)
    with pytest.raises(NormLayerError, match="layer '1' gets one value per channel"):
        try_batches(model, data, TestBN("momentum", tau=0.0, batch_size=2))


def test_a_pass_over_everything_needs_batches_of_two(points: Any) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double()
    for data, by in ((points(1), TestBN("full")), (points(3), TestBN("full", batch_size=1))):
        with pytest.raises(NormLayerError, match="layer '1' gets one value per channel"):
            evaluate_adapted(model, data, by)
        with pytest.raises(NormLayerError, match="layer '1' gets one value per channel"):
            try_batches(model, data, by)
    try_batches(model, points(3), TestBN("full", batch_size=2))
    assert evaluate_adapted(model, points(3), TestBN("full", batch_size=2)).num_examples == 3, "the last one joins"
    assert evaluate_adapted(model, points(0), TestBN("full")).num_examples == 0


def test_the_words_beside_a_result() -> None:
    assert str(TestBN("mix", prior=8, batch_size=50)) == "test-bn=mix (prior 8), batches of 50"
    assert str(TestBN("mix", alpha=0.3)) == "test-bn=mix (alpha 0.3), batches of the default size"
    assert str(TestBN("momentum", batch_size=2)) == "test-bn=momentum (tau 0.9), batches of 2"
    assert str(TestBN("full", batch_size=2)) == "test-bn=full, batches of 2"


@pytest.mark.parametrize(
    ("values", "words"), [({"prior": -1.0}, "prior"), ({"alpha": 1.5}, "alpha"), ({"tau": 1.0}, "tau")]
)
def test_numbers_out_of_range_are_refused(values: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"{words}="):
        TestBN("mix", **values)
