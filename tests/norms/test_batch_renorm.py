"""Batch renormalisation equals BatchNorm at r_max 1 and d_max 0.

Otherwise, it follows Ioffe's formula.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.norms import replace_norm
from fedbn_flwr.norms.renorm import BatchRenorm
from fedbn_flwr.training.randomness import torch_generator

C = 5
SHAPES: dict[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (6, C),
    nn.BatchNorm2d: (4, C, 3, 2),
    nn.BatchNorm3d: (3, C, 2, 2, 2),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def strange(layer: nn.Module) -> nn.Module:
    """Give a layer random gamma, beta and running statistics."""
    random = torch_generator(0, "strange")
    for name, value in layer.state_dict().items():
        if value.is_floating_point():
            value.copy_(
                torch.randn(C, generator=random, dtype=torch.float64)
                + (3 if "var" in name else 0)
            )
            value.abs_() if "var" in name else value
    return layer


def batches(
    kind: type[nn.Module], count: int = 4, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    random = torch_generator(0, "batches")
    draw = [
        torch.randn(SHAPES[kind], generator=random, dtype=torch.float64)
        for _ in range(count)
    ]
    return [((0.3 + k) * x + 2 * k).to(dtype) for k, x in enumerate(draw)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", SHAPES)
def test_without_corrections_it_is_batchnorm_bit_for_bit(
    kind: type[nn.BatchNorm2d], affine: bool, momentum: float | None, dtype: torch.dtype
) -> None:
    old = strange(kind(C, eps=1e-3, momentum=momentum, affine=affine)).to(dtype)
    new, _ = replace_norm(old, "batch-renorm", rmax=1.0, dmax=0.0, warmup_steps=0)
    assert isinstance(new, BatchRenorm)
    for x in batches(kind, dtype=dtype):
        pair = [x.clone().requires_grad_() for _ in range(2)]
        out = [old(pair[0]), new(pair[1])]
        upstream = torch.linspace(-1, 1, x.numel(), dtype=dtype).view(x.shape)
        for y in out:
            y.backward(upstream)
        assert torch.equal(out[0], out[1])
        assert torch.equal(pair[0].grad, pair[1].grad)
    assert all(
        torch.equal(value, new.state_dict()[name])
        for name, value in old.state_dict().items()
    )
    if affine:
        assert torch.equal(old.weight.grad, new.weight.grad)
        assert torch.equal(old.bias.grad, new.bias.grad)
    assert torch.equal(old.eval()(x), new.eval()(x))


def slow(
    x: Tensor, state: dict[str, Tensor], rmax: float, dmax: float, eps: float
) -> Tensor:
    """Compute the forward pass of Ioffe's Algorithm 1, channel by channel.

    ``state`` is updated as torch does it, with the unbiased variance.
    """
    channels = []
    for c in range(x.shape[1]):
        values = x[:, c]
        n = values.numel()
        mean = values.sum() / n
        sigma_b = (((values - mean) ** 2).sum() / n + eps).sqrt()
        sigma = (state["running_var"][c] + eps).sqrt()
        r = float((sigma_b / sigma).detach().clamp(1 / rmax, rmax))
        d = float(
            ((mean - state["running_mean"][c]) / sigma).detach().clamp(-dmax, dmax)
        )
        x_hat = (values - mean) / sigma_b * r + d
        channels.append(state["weight"][c] * x_hat + state["bias"][c])
        with torch.no_grad():
            state["running_mean"][c] += 0.1 * (mean - state["running_mean"][c])
            state["running_var"][c] += 0.1 * (
                ((values - mean) ** 2).sum() / (n - 1) - state["running_var"][c]
            )
    state["num_batches_tracked"] += 1
    return torch.stack(channels, 1)


@pytest.mark.parametrize("warmup", [0, 2, 1000])
@pytest.mark.parametrize("kind", SHAPES)
def test_forward_backward_and_warm_up_equal_the_formula(
    kind: type[nn.BatchNorm2d], warmup: int
) -> None:
    old = strange(kind(C, eps=1e-3).double())
    new, _ = replace_norm(old, "batch-renorm", rmax=1.5, dmax=0.7, warmup_steps=warmup)
    state = {name: value.clone() for name, value in old.state_dict().items()}
    for name in ("weight", "bias"):
        state[name].requires_grad_()
    for step, x in enumerate(batches(kind)):
        share = min(1, step / warmup) if warmup else 1
        assert [float(limit) for limit in new.limits()] == pytest.approx(
            [1 + 0.5 * share, 0.7 * share], abs=1e-12
        )
        pair = [x.clone().requires_grad_() for _ in range(2)]
        want = slow(pair[0], state, 1 + 0.5 * share, 0.7 * share, 1e-3)
        got = new(pair[1])
        upstream = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape)
        want.backward(upstream)
        got.backward(upstream)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(pair[1].grad, pair[0].grad, rtol=1e-10, atol=1e-10)
    for name in ("weight", "bias"):
        torch.testing.assert_close(
            new.get_parameter(name).grad, state[name].grad, rtol=1e-10, atol=1e-10
        )
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(
            new.get_buffer(name), state[name], rtol=1e-12, atol=1e-12
        )


def test_state_is_that_of_batchnorm() -> None:
    model = nn.Sequential(
        nn.Linear(3, C),
        nn.BatchNorm1d(C, momentum=0.3, dtype=torch.float64),
        nn.BatchNorm1d(C),
    )
    model[1].weight.requires_grad_(False)
    model[1].eval()
    new, report = replace_norm(model, "batch-renorm")
    assert split_state(new) == split_state(model)
    assert [row.new for row in report] == [f"BatchRenorm({C})"] * 2
    layer = new[1]
    assert (layer.momentum, layer.training, layer.weight.dtype) == (
        0.3,
        False,
        torch.float64,
    )
    assert (layer.weight.requires_grad, layer.bias.requires_grad) == (False, True)
    assert (layer.rmax, layer.dmax, layer.warmup_steps) == (3.0, 5.0, 1000)
    assert "rmax=3, dmax=5" in repr(layer)
    assert layer.running_mean.data_ptr() != model[1].running_mean.data_ptr()
    assert torch.equal(pickle.loads(pickle.dumps(layer)).weight, layer.weight)


def test_frozen_in_eval_mode_inside_a_training_model() -> None:
    model, _ = replace_norm(
        nn.Sequential(strange(nn.BatchNorm2d(C).double())), "batch-renorm"
    )
    model.train()
    model[0].eval()
    before = copy.deepcopy(model.state_dict())
    model(batches(nn.BatchNorm2d)[0])
    assert all(
        torch.equal(value, model.state_dict()[name]) for name, value in before.items()
    )


def test_half_precision_inputs_keep_their_dtype() -> None:
    layer, _ = replace_norm(nn.BatchNorm2d(C), "batch-renorm", warmup_steps=0)
    x = batches(nn.BatchNorm2d)[1].to(torch.bfloat16)
    narrow, wide = layer.corrections(x), layer.corrections(x.float())
    assert all(map(torch.equal, narrow, wide)), "computed in float32"
    assert layer(x).dtype == torch.bfloat16
    assert layer.running_var.dtype == torch.float32


def test_a_batch_of_no_rows_moves_nothing_and_has_no_gradient() -> None:
    layer, _ = replace_norm(strange(nn.BatchNorm2d(C).double()), "batch-renorm")
    before = (layer.running_mean.clone(), layer.running_var.clone())
    layer(torch.empty(0, C, 2, 2, dtype=torch.float64)).sum().backward()
    assert all(map(torch.equal, before, (layer.running_mean, layer.running_var)))
    assert not layer.weight.grad.any()
    assert not layer.bias.grad.any()


def test_layers_without_statistics_are_refused_by_name() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(C), nn.Sequential(nn.BatchNorm2d(C, track_running_stats=False))
    )
    with pytest.raises(NormLayerError, match=r"none: 1\.0 \(BatchNorm2d\)"):
        replace_norm(model, "batch-renorm")


@pytest.mark.parametrize(
    "wrong",
    [
        {"rmax": 0.5},
        {"dmax": -1},
        {"warmup_steps": -1},
        {"warmup_steps": 1.5},
        {"rmax": float("nan")},
        {"dmax": True},
    ],
)
def test_options_out_of_range(wrong: dict[str, object]) -> None:
    with pytest.raises(
        ConfigError, match=f"norm 'batch-renorm': {next(iter(wrong))} is"
    ):
        replace_norm(nn.BatchNorm1d(C), "batch-renorm", **wrong)
