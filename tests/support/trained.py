"""A small network with BatchNorm that has learned some data."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def trained_network(
    inputs: Tensor, targets: Tensor, epochs: int, batch_size: int
) -> nn.Module:
    """Return a trained network 64 -> 48 -> 32 -> 10 in eval mode.

    It has BatchNorm after each hidden layer and is trained with SGD.
    """
    torch.manual_seed(0)
    layers = [
        nn.Linear(64, 48),
        nn.BatchNorm1d(48),
        nn.ReLU(),
        nn.Linear(48, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
    ]
    model = nn.Sequential(*layers, nn.Linear(32, 10))
    learn(model, inputs, targets, epochs, batch_size)
    return model.eval()


def learn(
    model: nn.Module, inputs: Tensor, targets: Tensor, epochs: int, batch_size: int
) -> None:
    """Train a model with SGD, in batches of a random order."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for batch in torch.randperm(len(inputs)).split(batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
