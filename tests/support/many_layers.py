"""Models of two BatchNorm layers in a row, one with entries of every type."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.seeds import with_seed

SETTINGS = {
    "fixbn": {"freeze_at": 2},
    "fedtan2": {"fedtan_rounds": 2},
    "fedbs": {"fedbs_eps": 1e9, "fedbs_rounds": 3},
    "fedavgm": {"server_momentum": 0.8},
    "fedrep": {"personal": "6"},
}
"""Settings with which every method reaches its phases in a few rounds."""


@with_seed()
def two_layers() -> nn.Module:
    """Return a seeded float64 net with two BatchNorm layers.

    It maps 5 numbers to 3 classes.
    """
    first = [nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU()]
    return nn.Sequential(
        *first, nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)
    ).double()


class EveryType(nn.Sequential):
    """The same layers, with the first layer in float32.

    It also has a scale, a frozen number and buffers of every type. Training changes the
    buffers.
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
    """A ReLU with a buffer of each type. The buffers grow in training."""

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
