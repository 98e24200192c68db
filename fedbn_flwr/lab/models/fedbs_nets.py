"""The two convolutional networks of FedBS, for the MNISTs and for CIFAR-10.

Source: FedBS, section V-A. MNIST: 5x5 convolutions of 16 and 32 channels, then one
linear layer on 1568 values. CIFAR: a 5x5 convolution of 100 channels, 3x3 convolutions
of 150, 250 and 500 channels, then linear layers on 4500, 270 and 150 values. After each
convolution: BatchNorm, ReLU and 2x2 max pooling.

Ours, because the paper does not define them: padding 2 everywhere (28 and 32 pixels
then give 1568 and 4500 values), ReLU between the linear layers, biases, and torch's
default initialisation.
"""

from __future__ import annotations

import itertools

from torch import Tensor, nn


class FedBSNet(nn.Module):
    """Blocks of convolution, BatchNorm, ReLU and pooling, then linear layers."""

    def __init__(
        self,
        channels: tuple[int, ...],
        kernels: tuple[int, ...],
        linear: tuple[int, ...],
    ) -> None:
        """Build layers from the channels of images up to the number of classes.

        ``channels`` are the widths of the convolutions, beginning with the images;
        ``linear`` are the widths of the linear layers.
        """
        super().__init__()
        blocks: list[nn.Module] = []
        pairs = itertools.pairwise(channels)
        for (before, after), kernel in zip(pairs, kernels, strict=True):
            blocks += [
                nn.Conv2d(before, after, kernel, padding=2),
                nn.BatchNorm2d(after),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
        self.features = nn.Sequential(*blocks)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(linear):
            layers += [nn.Linear(before, after), nn.ReLU()]
        # Logits have no ReLU after them.
        self.classifier = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, classes) of images (N, channels, S, S), S = 28 or 32."""
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


def mnist_net(num_classes: int) -> FedBSNet:
    """Return the network for images (1, 28, 28)."""
    return FedBSNet((1, 16, 32), (5, 5), (1568, num_classes))


def cifar_net(num_classes: int) -> FedBSNet:
    """Return the network for images (3, 32, 32)."""
    return FedBSNet(
        (3, 100, 150, 250, 500), (5, 3, 3, 3), (4500, 270, 150, num_classes)
    )
