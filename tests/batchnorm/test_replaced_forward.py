"""A replaced forward pass uses BatchNorm's own pass if both are equal.

The moments of all batches are merged and pooled.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm import reestimation
from fedbn_flwr.batchnorm.reestimation import (
    MomentSums,
    moments_of,
)

KINDS = {
    "1d": (nn.BatchNorm1d, (6, 5)),
    "2d": (nn.BatchNorm2d, (4, 5, 3, 2)),
    "3d": (nn.BatchNorm3d, (4, 5, 1, 2, 2)),
}


class Net(nn.Module):
    """One BatchNorm layer between compiled parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.first(x).relu()).tanh()
        return out


@pytest.fixture
def compiled() -> tuple[Net, Any, list[Any]]:
    """Return a model, its compiled form, and the graphs compiled so far."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = Net()
    return model, torch.compile(model, backend=backend), graphs


class Renormalised(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_sums_over_batches_are_the_moments_of_all_values(
    offset: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more calls than kept moments, so moments are merged."""
    monkeypatch.setattr(reestimation, "_KEPT", 2)
    sums = MomentSums()
    x = torch.randn(7, 3, 2, 2, dtype=torch.float64) + offset
    for batch in x.split(3):  # the last batch has one example
        sums.gather("0", batch)
        assert len(sums._moments["0"]) == 1
    found, want = sums.merged()["0"], moments_of(x)
    assert found.count == want.count == 28
    torch.testing.assert_close(found.mean, want.mean, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(found.m2, want.m2, rtol=1e-9, atol=0)
