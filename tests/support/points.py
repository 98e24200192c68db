"""A data set in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Points:
    """Labelled examples in memory.

    ``asked`` collects the positions of every batch.
    """

    inputs: Tensor
    targets: Tensor
    asked: list[list[int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(
        self, positions: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        self.asked.append(positions.tolist())
        return self.inputs[positions], self.targets[positions]

    def loss(self, model: nn.Module) -> Tensor:
        """Return the mean cross entropy over all examples."""
        return nn.functional.cross_entropy(model(self.inputs), self.targets)
