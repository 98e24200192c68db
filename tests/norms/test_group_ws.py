"""The formula of GroupNorm with weight standardisation, both ways, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.norms import replace_norm
from tests.support.formulas import equals_formula


def reference(weight: Tensor) -> Tensor:
    """Return the standardised filters, computed one by one with sums."""
    filters = []
    for one in weight:
        n = one.numel()
        mean = one.sum() / n
        std = (((one - mean) ** 2).sum() / (n - 1)).sqrt()
        filters.append((one - mean) / (std + 1e-5))
    return torch.stack(filters)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_forward_and_backward_equal_the_formula(dim: int, groups: int) -> None:
    conv = getattr(nn, f"Conv{dim}d")(
        4, 6, 3, stride=2, padding=1, groups=groups, padding_mode="circular"
    ).double()
    norm = getattr(nn, f"BatchNorm{dim}d")(6, eps=1e-3).double()
    old = nn.Sequential(conv, norm)
    new, report = replace_norm(old, "group+ws", groups=3)
    assert [row.path for row in report.replaced] == ["0", "1"]
    assert report.replaced[0].new.startswith(
        f"StandardisedConv{dim}d(4, 6, kernel_size="
    )

    x = torch.randn(2, 4, *[5] * dim, dtype=torch.float64)

    def formula(own: dict[str, Tensor]) -> Tensor:
        weight, bias, gamma, beta = own.values()
        y = conv._conv_forward(x, reference(weight), bias)
        return F.group_norm(y, 3, gamma, beta, 1e-3)

    equals_formula(new, x, formula, old.named_parameters())


def test_one_weight_per_filter_is_not_standardised() -> None:
    """Its standardised filter would be 0 / 0."""
    model = nn.Sequential(nn.Conv2d(4, 4, 1, groups=4), nn.BatchNorm2d(4))
    new, report = replace_norm(model, "group+ws")
    assert [row.path for row in report.replaced] == ["1"]
    assert torch.isfinite(new(torch.randn(2, 4, 3, 3))).all()
