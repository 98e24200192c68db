"""Fixup's weights, scalars and refusals, with the paper's networks by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from fedbn_flwr.lab.models.resnet import SmallResNet
from fedbn_flwr.norms import batchnorm_places, replace_norm
from tests.support.formulas import equals_formula

# The network, its residual branches, and the convolutions of a branch.
NETWORKS = {
    "basic": (lambda: ResNet(BasicBlock, [1, 2, 1, 1], num_classes=5), 5, 2),
    "bottleneck": (
        lambda: ResNet(
            Bottleneck, [1, 1, 2, 1], num_classes=5, groups=2, width_per_group=16
        ),
        5,
        3,
    ),
    "small": (lambda: SmallResNet(8, 5, 3), 3, 2),
}


def blocks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "conv2")]


def noise(model: nn.Module) -> nn.Module:
    """Give every parameter new values, so that no zero hides a term."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", NETWORKS)
def test_the_initial_weights(name: str) -> None:
    make, num_branches, depth = NETWORKS[name]
    old = make().double().requires_grad_(False)
    for block in blocks(old):
        last = getattr(block, f"conv{depth}")
        last.bias = nn.Parameter(torch.ones(last.out_channels).double(), False)
    new, report = replace_norm(old, "fixup")
    assert not any(parameter.requires_grad for parameter in new.parameters())
    assert not batchnorm_places(new)
    assert len(blocks(new)) == num_branches
    for before, after in zip(blocks(old), blocks(new), strict=True):
        for k in range(1, depth):
            conv, scaled = (getattr(block, f"conv{k}") for block in (before, after))
            fan_out = conv.weight.shape[0] * 3 ** (2 * (conv.kernel_size == (3, 3)))
            want = (2 / fan_out) ** 0.5 * num_branches ** (-1 / (2 * depth - 2))
            size = conv.weight.square().mean().sqrt()
            torch.testing.assert_close(
                scaled.weight, conv.weight * want / size, rtol=1e-11, atol=0
            )
        last = getattr(after, f"conv{depth}")
        assert not last.weight.any()
        assert not last.bias.any()
    state = new.state_dict()
    assert not state["fc.weight"].any()
    assert not state["fc.bias"].any()
    for key, value in old.state_dict().items():
        if key in ("conv.weight", "conv1.weight") or "downsample.0" in key:
            assert torch.equal(state[key], value)
    scalars = {key: value for key, value in state.items() if value.shape == (1,)}
    assert all(float(value) == key.endswith("scale") for key, value in scalars.items())
    assert sum(key.endswith("scale") for key in scalars) == num_branches
    shortcuts = sum("downsample.0.weight" in key for key in old.state_dict())
    # Each convolution of a branch has a bias before and after it. A shortcut, the stem
    # and the classifier have one bias each.
    assert len(scalars) == num_branches * (2 * depth + 1) + shortcuts + 2
    others = num_branches * depth + shortcuts + 1
    assert len(report.replaced) == len(batchnorm_places(old)) + others


def block_forward(
    block: nn.Module, x: Tensor, p: dict[str, Tensor], path: str, depth: int
) -> Tensor:
    """Compute a Fixup block from its parameters.

    Each convolution is conv(x + a) + b with a relu. The last is multiplied by scale,
    and the shortcut is added.
    """
    out = x
    for k in range(1, depth + 1):
        conv = getattr(block, f"conv{k}")
        norm = f"{path}.{'bn' if hasattr(block, 'bn1') else 'norm'}{k}"
        out = conv._conv_forward(
            out + p[f"{path}.conv{k}.bias_before"], p[f"{path}.conv{k}.weight"], None
        )
        if k == depth:
            out = out * p[f"{norm}.scale"]
        out = out + p[f"{norm}.bias"]
        if k < depth:
            out = F.relu(out)
    if hasattr(block, "shortcut"):
        return F.relu(out + block.shortcut(x))
    if f"{path}.downsample.0.weight" in p:
        x = F.conv2d(
            x + p[f"{path}.downsample.0.bias_before"],
            p[f"{path}.downsample.0.weight"],
            stride=block.downsample[0].stride,
        )
    return F.relu(out + x)


@pytest.mark.parametrize("name", NETWORKS)
def test_forward_and_backward_equal_the_network_written_out(name: str) -> None:
    make, _, depth = NETWORKS[name]
    new = noise(replace_norm(make().double(), "fixup")[0])
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)

    def formula(p: dict[str, Tensor]) -> Tensor:
        if name == "small":
            out = F.relu(F.conv2d(x, p["conv.weight"], padding=1) + p["norm.bias"])
        else:
            out = F.conv2d(x, p["conv1.weight"], stride=2, padding=3)
            out = F.max_pool2d(F.relu(out + p["bn1.bias"]), 3, 2, 1)
        for path, module in new.named_modules():
            if hasattr(module, "conv2"):
                out = block_forward(module, out, p, path, depth)
        out = out.mean((2, 3)) + p["fc.bias_before"]
        return F.linear(out, p["fc.weight"], p["fc.bias"])

    equals_formula(new, x, formula, new.named_parameters())
