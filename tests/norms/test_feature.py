"""Laws, strangers' models and refusals of feature normalisation."""

from __future__ import annotations

import functools

import pytest
import torch
import torchvision.models
from torch import nn
from torch.nn import functional

from fedbn_flwr.norms import use_feature_norm
from fedbn_flwr.norms.feature import NormalisedLinear

close = functools.partial(torch.testing.assert_close, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    ("name", "scale"),
    [("resnet18", "sqrt-d"), ("mobilenet_v3_small", "1")],
)
def test_the_length_of_the_features_does_not_matter_to_a_torchvision_model(
    name: str, scale
) -> None:
    torch.manual_seed(0)
    model = (
        torchvision.models.get_model(name, weights=None, num_classes=5).double().eval()
    )
    before = list(model.state_dict())
    use_feature_norm(model, scale)
    (head,) = (one for one in model.modules() if isinstance(one, NormalisedLinear))
    assert list(model.state_dict()) == before
    inputs = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    seen = []
    with torch.no_grad():
        handle = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        plain = model(inputs)
        handle.remove()
        fixed = functional.rms_norm(seen[0], seen[0].shape[1:], eps=0)
        if scale == "1":
            fixed /= seen[0].shape[1] ** 0.5
        close(plain, functional.linear(fixed, head.weight, head.bias))
        head.register_forward_pre_hook(lambda _, args: (args[0] * 37.5,))
        close(model(inputs), plain)
        assert plain.shape == (2, 5)


@pytest.mark.parametrize("leading", [(2,), (2, 3), (2, 3, 4)])
def test_each_position_has_features_of_length_root_d(leading: tuple[int, ...]) -> None:
    """They are rms_norm over the last axis, with any axes before it."""
    head = nn.Linear(6, 5).double()
    use_feature_norm(head)
    x = torch.randn(*leading, 6, dtype=torch.float64)
    fixed = functional.rms_norm(x, (6,), eps=0)
    right = functional.linear(fixed, head.weight, head.bias)
    close(head(x), right)


def test_features_that_are_all_zero_stay_zero_and_get_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        model[0].bias.fill_(-1e3)
    use_feature_norm(model)
    out = model(torch.randn(5, 4, dtype=torch.float64))
    torch.testing.assert_close(out, model[2].bias.expand(5, 3))
    out.square().sum().backward()
    assert model[0].weight.grad.abs().max() == 0
    assert torch.isfinite(model[2].weight.grad).all()


@pytest.mark.parametrize("value", [300.0, 4000.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_takes_the_length_in_float32(
    dtype: torch.dtype, value: float
) -> None:
    head = nn.Linear(400, 2).to(dtype)
    use_feature_norm(head)
    # The sum of squares is above float16's largest value. At 4000, the length is also
    # above it.
    x = torch.full((1, 400), value, dtype=dtype)
    out = head(x)
    assert out.dtype == dtype
    ones = functional.linear(torch.ones(1, 400), head.weight.float(), head.bias.float())
    torch.testing.assert_close(out.float(), ones, rtol=0.02, atol=0.02)
    wide = nn.Linear(400, 2)
    use_feature_norm(wide)
    with torch.autocast("cpu", dtype):
        assert wide(x.float()).dtype == dtype
