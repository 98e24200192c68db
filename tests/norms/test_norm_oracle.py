"""Each norm compared with its formula, forward and backward, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.norms import replace_norm

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
# test_group_ws.py, test_wsconv.py and test_fixup.py test the other norms.
KINDS = ["batch", *GROUPS, "none"]
CASES = [
    (kind, dim, shape)
    for kind in KINDS
    for dim, shapes in SHAPES.items()
    for shape in shapes
]


def formula(kind: str, x: Tensor, layer: nn.Module) -> Tensor:
    """Apply the formula, with each set as the last axis of a reshaped x."""
    if kind == "none":
        return x
    swapped = x.transpose(0, 1) if kind == "batch" else x
    sets = swapped.reshape(CHANNELS if kind == "batch" else len(x) * GROUPS[kind], -1)
    mean, var = sets.mean(1, keepdim=True), sets.var(1, correction=0, keepdim=True)
    normal = ((sets - mean) / (var + EPS).sqrt()).reshape(swapped.shape)
    per_channel = (1, -1) + (1,) * (x.dim() - 2)
    gamma, beta = layer.weight.view(per_channel), layer.bias.view(per_channel)
    return gamma * (normal.transpose(0, 1) if kind == "batch" else normal) + beta


@pytest.mark.parametrize(("kind", "dim", "shape"), CASES)
def test_forward_and_backward_equal_the_formula(
    kind: str, dim: int, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    old = LAYERS[dim](CHANNELS, eps=EPS).double()
    nn.init.normal_(old.weight)
    nn.init.normal_(old.bias)
    x = (3 + 2 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    upstream = torch.randn(shape, dtype=torch.float64)
    new, _ = replace_norm(nn.Sequential(old), kind)
    ends = []
    for y, model in ((new(x), new), (formula(kind, x, old), old)):
        of = [x, *model.parameters()][: 1 if kind == "none" else 3]
        ends.append([y, *torch.autograd.grad(y, of, upstream)])
    for found, wanted in zip(*ends, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    if kind not in ("batch", "none"):
        # An example's own statistics serve in evaluation too.
        assert torch.equal(new.eval()(x), ends[0][0])
