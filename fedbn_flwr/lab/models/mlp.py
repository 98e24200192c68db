"""The multilayer perceptron 784-30-10 of the FedTAN paper's MNIST runs.

BatchNorm is after the hidden layer.

Source: Wang, Shi & Chang 2023, arXiv:2301.02982, section 6.1 ("a 3-layer DNN with
dimensions 784 x 30 x 10, where the hidden layer with 30 neurons is followed by a BN
layer"). Its Table 5 counts 23,920 entries: all except the 60 running statistics.

Ours, because neither the paper nor the authors' code defines them: ReLU after
BatchNorm, and torch's default initialisation. The hidden layer has a bias, since the
23,920 entries include it. Other widths, more hidden layers, and rows of numbers
(tables) instead of images are also ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, nn

__all__ = ["HIDDEN", "MLP", "SIDE"]

SIDE = 28
HIDDEN = (30,)


class MLP(nn.Module):
    """Hidden layers of Linear - BatchNorm1d - ReLU, and a last Linear to the classes.

    The second hidden layer's entries are called ``hidden2`` and ``norm2``, and so on.
    """

    def __init__(
        self,
        num_classes: int,
        num_inputs: int = SIDE * SIDE,
        hidden: Sequence[int] = HIDDEN,
    ) -> None:
        """Build the layers, with the widths of one or more hidden layers."""
        super().__init__()
        # The first layer has no number in its name, so a model with one hidden layer
        # has the names hidden and norm.
        self._numbers = ["", *map(str, range(2, len(hidden) + 1))]
        widths = itertools.pairwise((num_inputs, *hidden))
        for number, (before, after) in zip(self._numbers, widths, strict=True):
            self.add_module(f"hidden{number}", nn.Linear(before, after))
            self.add_module(f"norm{number}", nn.BatchNorm1d(after))
        self.relu = nn.ReLU()
        self.fc = nn.Linear(hidden[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, classes) of rows, or of images with as many pixels."""
        x = x.flatten(1)
        for number in self._numbers:
            x = getattr(self, f"hidden{number}")(x)
            x = self.relu(getattr(self, f"norm{number}")(x))
        logits: Tensor = self.fc(x)
        return logits
