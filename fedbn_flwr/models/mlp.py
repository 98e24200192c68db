"""The multilayer perceptron of the FedTAN paper's MNIST runs: 784-30-10 with BatchNorm after the hidden layer.

Source: Wang, Shi & Chang 2023, arXiv:2301.02982, section 6.1 ("a 3-layer DNN with dimensions 784 x 30 x 10, where the
hidden layer with 30 neurons is followed by a BN layer"). Its Table 5 counts 23,920 entries: all except the 60 running
statistics.

Ours, because neither the paper nor the authors' code says: ReLU after BatchNorm, and torch's default initialisation.
The hidden layer has a bias, which the 23,920 entries include.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["MLP", "mlp", "mlp_shape"]

SIDE = 28
HIDDEN = 30


class MLP(nn.Module):
    """Linear(784, 30) - BatchNorm1d - ReLU - Linear(30, classes) on images (N, 1, 28, 28)."""

    def __init__(self, num_classes: int) -> None:
        """Build the layers."""
        super().__init__()
        self.hidden = nn.Linear(SIDE * SIDE, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(HIDDEN, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, classes) of images (N, 1, 28, 28)."""
        logits: Tensor = self.fc(self.relu(self.norm(self.hidden(x.flatten(1)))))
        return logits


def mlp(num_classes: int, channels: int, size: int) -> nn.Module:
    """Return the network; its input is always (1, 28)."""
    return MLP(num_classes)


def mlp_shape(channels: int, size: int) -> tuple[int, int]:
    """Return (1, 28), grey images of 28 x 28, for every data set."""
    return 1, SIDE
