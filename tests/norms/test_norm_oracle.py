"""Each norm compared with its formula, forward and backward, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.norms import replace_norm
from fedbn_flwr.training.randomness import torch_generator

CHANNELS = 6
EPS = 1e-3
SHAPES: dict[int, list[tuple[int, ...]]] = {
    1: [(4, CHANNELS, 5), (1, CHANNELS, 3)],
    2: [(4, CHANNELS, 3, 2)],
    3: [(3, CHANNELS, 2, 2, 3)],
}
LAYERS: dict[int, type[nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d]] = {
    1: nn.BatchNorm1d,
    2: nn.BatchNorm2d,
    3: nn.BatchNorm3d,
}
GROUPS = {"group": 2, "layer": 1, "instance": CHANNELS}
# the others: test_group_ws.py, test_batch_renorm.py, test_wsconv.py, test_fixup.py
KINDS = ["batch", *GROUPS, "none"]
CASES = [
    (kind, dim, shape)
    for kind in KINDS
    for dim, shapes in SHAPES.items()
    for shape in shapes
]


def formula(
    kind: str, x: Tensor, gamma: Tensor, beta: Tensor, upstream: Tensor
) -> tuple[Tensor, ...]:
    """Return y, dx, dgamma, dbeta by the formula; each set that is normalised is the
    last axis of a reshaped x.
    """
    if kind == "none":
        return x, upstream, torch.zeros_like(gamma), torch.zeros_like(beta)
    per_channel = (1, -1) + (1,) * (x.dim() - 2)

    def to_sets(t: Tensor) -> Tensor:
        return (
            t.transpose(0, 1).reshape(CHANNELS, -1)
            if kind == "batch"
            else t.reshape(len(t) * GROUPS[kind], -1)
        )

    def from_sets(t: Tensor) -> Tensor:
        swapped = (CHANNELS, len(x), *x.shape[2:])
        return (
            t.reshape(swapped).transpose(0, 1)
            if kind == "batch"
            else t.reshape(x.shape)
        )

    sets = to_sets(x)
    mean = sets.mean(1, keepdim=True)
    root = (((sets - mean) ** 2).mean(1, keepdim=True) + EPS).sqrt()
    normal = (sets - mean) / root
    g = to_sets(upstream * gamma.view(per_channel))
    dx = (
        g - g.mean(1, keepdim=True) - normal * (g * normal).mean(1, keepdim=True)
    ) / root
    x_hat = from_sets(normal)
    others = [d for d in range(x.dim()) if d != 1]
    y = gamma.view(per_channel) * x_hat + beta.view(per_channel)
    return y, from_sets(dx), (upstream * x_hat).sum(others), upstream.sum(others)


@pytest.mark.parametrize(("kind", "dim", "shape"), CASES)
def test_forward_and_backward_equal_the_formula(
    kind: str, dim: int, shape: tuple[int, ...]
) -> None:
    random = torch_generator(0, "oracle", kind, dim)
    old = LAYERS[dim](CHANNELS, eps=EPS).double()
    with torch.no_grad():
        old.weight.copy_(torch.randn(CHANNELS, generator=random, dtype=torch.float64))
        old.bias.copy_(torch.randn(CHANNELS, generator=random, dtype=torch.float64))
    x = 3 + 2 * torch.randn(shape, generator=random, dtype=torch.float64)
    upstream = torch.randn(shape, generator=random, dtype=torch.float64)

    new, _ = replace_norm(nn.Sequential(old), kind)
    x.requires_grad_()
    y = new(x)
    y.backward(upstream)

    want_y, want_dx, want_dgamma, want_dbeta = formula(
        kind, x.detach(), old.weight.data, old.bias.data, upstream
    )
    torch.testing.assert_close(y.detach(), want_y, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(x.grad, want_dx, rtol=1e-11, atol=1e-11)
    if kind != "none":
        torch.testing.assert_close(
            new.get_parameter("0.weight").grad, want_dgamma, rtol=1e-11, atol=1e-11
        )
        torch.testing.assert_close(
            new.get_parameter("0.bias").grad, want_dbeta, rtol=1e-11, atol=1e-11
        )
    if kind not in ("batch", "none"):
        assert torch.equal(new.eval()(x), y), (
            "an example's own statistics serve in evaluation too"
        )


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_groups_normalise_neighbouring_channels_together(groups: int) -> None:
    x = 1 + torch.randn(
        2, CHANNELS, 4, generator=torch_generator(0, "groups"), dtype=torch.float64
    )
    layer, _ = replace_norm(
        nn.BatchNorm1d(CHANNELS, affine=False, eps=1e-12).double(),
        "group",
        groups=groups,
    )
    size = CHANNELS // groups
    for first in range(0, CHANNELS, size):
        part = layer(x)[:, first : first + size].flatten(1)
        torch.testing.assert_close(
            part.mean(1), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-12
        )
        torch.testing.assert_close(
            part.var(1, correction=0),
            torch.ones(2, dtype=torch.float64),
            rtol=1e-8,
            atol=0,
        )
