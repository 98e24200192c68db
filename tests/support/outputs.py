"""Examples with chosen outputs, and the model for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Outputs:
    """Examples whose inputs are the model's outputs, with the group of each."""

    def __init__(
        self, outputs: Tensor, targets: Tensor, units: Tensor | None = None
    ) -> None:
        self.outputs, self.targets, self.units = outputs, targets, units

    def __len__(self) -> int:
        return len(self.outputs)

    def batch(
        self, positions: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.outputs[positions], self.targets[positions]


class Identity(nn.Module):
    """A model that returns its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.one
