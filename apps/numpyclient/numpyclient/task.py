"""Model, data and training of the project: nothing here knows of federated learning."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Net", "accuracy_and_loss", "load_data", "train"]


class Net(nn.Module):
    """A small network for 8x8 digits, with two BatchNorm layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.hidden = nn.Linear(8 * 16, 32)
        self.hidden_norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, 10) of images (N, 1, 8, 8)."""
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        logits: Tensor = self.head(F.relu(self.hidden_norm(self.hidden(x.flatten(1)))))
        return logits


def load_data(
    partition_id: int, num_partitions: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a client's images and labels, for training and for testing: every
    ``num_partitions``-th digit.
    """
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    own = torch.arange(partition_id, len(labels), num_partitions)
    train, test = own[len(own) // 5 :], own[: len(own) // 5]
    return (images[train], labels[train]), (images[test], labels[test])


def train(net: nn.Module, data: tuple[Tensor, Tensor], learning_rate: float) -> float:
    """Train for one epoch, in order; return the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=learning_rate, momentum=0.9)
    net.train()
    total = 0.0
    for start in range(0, len(data[1]), 32):
        images, labels = data[0][start : start + 32], data[1][start : start + 32]
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total += float(loss.detach()) * len(labels)
    return total / len(data[1])


def accuracy_and_loss(
    net: nn.Module, data: tuple[Tensor, Tensor]
) -> tuple[float, float]:
    """Return accuracy and mean loss."""
    net.eval()
    with torch.no_grad():
        logits = net(data[0])
    return float((logits.argmax(1) == data[1]).float().mean()), float(
        F.cross_entropy(logits, data[1])
    )
