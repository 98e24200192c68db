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


def other_lenet() -> dict[str, Tensor]:
    """Return the state of a LeNet that differs from a run's, even in statistics."""
    # Import here, because other tests of the core need no laboratory.
    from fedbn_flwr.lab.models import build_model

    model = build_model("lenet", num_classes=10, input_shape=(1, 28, 28), seed=9)
    return {
        name: value * 1.1 + 0.01 if value.is_floating_point() else value + 1
        for name, value in model.state_dict().items()
    }


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
