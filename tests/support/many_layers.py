"""Models of several BatchNorm layers: two in a row; called twice, never, by keyword,
frozen, or at two paths.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def two_layers() -> nn.Module:
    """Two layers of BatchNorm on 5 numbers, 3 classes; float64, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = [nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU()]
        return nn.Sequential(
            *first, nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)
        ).double()


class Many(nn.Module):
    """A layer called twice, one registered twice, one the model keeps in eval mode, one
    never called, one untracked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.a, self.frozen, self.idle = (
            nn.BatchNorm1d(5) for _ in range(4)
        )
        self.b = self.a
        self.bare = nn.BatchNorm1d(5, track_running_stats=False)

    def train(self, mode: bool = True) -> Many:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.bare(self.twice(self.frozen(x)) + self.twice(self.a(input=x * x)))
