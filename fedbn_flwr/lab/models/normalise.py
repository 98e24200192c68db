"""A layer that normalises inputs in the form of the data, for exported models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Normalise(nn.Module):
    """(x / scale - mean) / std in float32, with the bits of the tests of a run.

    Args:
        mean: mean per channel of images (N, C, H, W), or per feature of rows (N, C);
            () means 0.
        std: standard deviation in the same way, above 0; () means 1.
        scale: 255 for pixels 0..255, 1 for other numbers.
        dims: dimensions of an input after its channels: 2 for images, 0 for rows.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        scale: float = 255.0,
        dims: int = 2,
    ) -> None:
        super().__init__()
        # Use buffers, so that an exported model contains the mean and the std.
        for name, values in (("mean", mean or (0.0,)), ("std", std or (1.0,))):
            self.register_buffer(
                name, torch.tensor(values, dtype=torch.float32).view(-1, *[1] * dims)
            )
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised inputs, float32, in the shape of ``x``."""
        # Keep these three operations: one multiplication and one addition would be
        # enough, but would give other last bits than the run's tests.
        return (x.to(torch.float32) / self.scale - self.mean) / self.std


def normalised_inside(model: nn.Module, normalise: nn.Module) -> nn.Module:
    """Return the model behind the layer that normalises its inputs, in eval mode."""
    return nn.Sequential(normalise, model).eval()
