"""Models of several BatchNorm layers: two in a row, also with entries of every type;
called twice, never, by keyword, frozen, or at two paths.
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


class EveryType(nn.Sequential):
    """The same layers, the first one in float32, with a scale, a frozen number and
    buffers of every type, which move in training.
    """

    def __init__(self) -> None:
        super().__init__(*two_layers())
        self[0].float()
        self[1].float()
        self[2] = Moving()
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.tensor(1.0).half(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale * x.float()
        for place, layer in enumerate(self):
            x = layer(x if place < 2 else x.double())
        return x


class Moving(nn.Module):
    """A ReLU. Its buffers, one of each type, grow in training."""

    def __init__(self) -> None:
        super().__init__()
        for dtype, shape in BUFFERS:
            name = str(dtype).removeprefix("torch.")
            self.register_buffer(f"of_{name}", torch.zeros(shape, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        for buffer in self.buffers():
            if self.training:
                buffer += torch.ones((), dtype=buffer.dtype)
        return x.relu()


BUFFERS = (
    *((torch.bool, ()), (torch.uint8, (2,)), (torch.int16, ()), (torch.int32, (0, 3))),
    *((torch.float16, (2,)), (torch.float64, ()), (torch.complex64, (2,))),
)


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
