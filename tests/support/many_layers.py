"""A model whose BatchNorm layers are called twice, never, by keyword, frozen, or stand at two paths."""

from __future__ import annotations

from torch import Tensor, nn


class Many(nn.Module):
    """A layer called twice, one registered twice, one the model keeps in eval mode, one never called, one untracked."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.a, self.frozen, self.idle = (nn.BatchNorm1d(5) for _ in range(4))
        self.b = self.a
        self.bare = nn.BatchNorm1d(5, track_running_stats=False)

    def train(self, mode: bool = True) -> Many:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.bare(self.twice(self.frozen(x)) + self.twice(self.a(input=x * x)))
