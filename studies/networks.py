"""The networks of the papers FedBN and FedBS, for the studies of this folder.

A study names one as ``model: "studies.networks:NAME"``, from the folder of the checkout.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import Tensor, nn

# --- AlexNet of FedBN -------------------------------------------------------------------
# AlexNet as FedBN trains it, and a small variant for 64 pixels.
#
# BatchNorm is after every layer except the last.
#
# Source: Krizhevsky et al. 2012 in the form of Li et al. 2021, arXiv:2102.07623, Table 6
# and the authors' code (``AlexNet``), for Office-Caltech10 and DomainNet at 256 pixels:
# 57,063,498 parameters for ten classes, 7 BatchNorm layers, two of them 1d. FedTAN and
# FedWon use it too. Torch's default initialisation, no dropout.
#
# Ours: ``alexnet-bn-small`` has the same order of layers with half the channels in the
# convolutions, 512 in the linear layers, a 5x5 stem of stride 2, and 3x3 instead of 6x6
# positions before the classifier: 1,475,626 parameters. At 64 pixels, the last
# convolutions of the full network get 3x3 positions, and its 6x6 positions before the
# classifier are copies of one value per channel.


@dataclass(frozen=True)
class Widths:
    """The sizes that differ between the two variants.

    Attributes:
        channels: channels of the five convolutions.
        linear: width of the linear layers.
        stem: kernel and stride of the first convolution.
        side: positions per side before the classifier.
    """

    channels: tuple[int, int, int, int, int]
    linear: int
    stem: tuple[int, int]
    side: int


FULL = Widths((64, 192, 384, 256, 256), 4096, (11, 4), 6)
SMALL = Widths((32, 96, 192, 128, 128), 512, (5, 2), 3)


class AlexNet(nn.Module):
    """AlexNet with five convolutions and three linear layers.

    Pooling follows the first, second and fifth convolution.
    """

    def __init__(self, num_classes: int, widths: Widths) -> None:
        """Build the layers."""
        super().__init__()
        a, b, c, d, e = widths.channels
        kernel, stride = widths.stem
        self.features = nn.Sequential(
            *_block(nn.Conv2d(3, a, kernel, stride, padding=2), nn.BatchNorm2d(a)),
            nn.MaxPool2d(3, stride=2),
            *_block(nn.Conv2d(a, b, 5, padding=2), nn.BatchNorm2d(b)),
            nn.MaxPool2d(3, stride=2),
            *_block(nn.Conv2d(b, c, 3, padding=1), nn.BatchNorm2d(c)),
            *_block(nn.Conv2d(c, d, 3, padding=1), nn.BatchNorm2d(d)),
            *_block(nn.Conv2d(d, e, 3, padding=1), nn.BatchNorm2d(e)),
            nn.MaxPool2d(3, stride=2),
        )
        # Pool to a fixed number of positions, so that larger images fit the classifier
        # as well.
        self.pool = nn.AdaptiveAvgPool2d(widths.side)
        width = widths.linear
        self.classifier = nn.Sequential(
            *_block(nn.Linear(e * widths.side**2, width), nn.BatchNorm1d(width)),
            *_block(nn.Linear(width, width), nn.BatchNorm1d(width)),
            nn.Linear(width, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, classes) of images (N, 3, S, S), S at least 64."""
        logits: Tensor = self.classifier(self.pool(self.features(x)).flatten(1))
        return logits


def _block(layer: nn.Module, norm: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    return layer, norm, nn.ReLU(inplace=True)


def alexnet_bn(num_classes: int) -> AlexNet:
    """Return AlexNet for images (3, S, S), S at least 64; FedBN has 256 pixels."""
    return AlexNet(num_classes, FULL)


def alexnet_bn_small(num_classes: int) -> AlexNet:
    """Return the narrower AlexNet, for 64 pixels."""
    return AlexNet(num_classes, SMALL)


# --- the digits network of FedBN --------------------------------------------------------
# The digits network of FedBN, with BatchNorm after every layer except the last.
#
# Source: Li et al. 2021, arXiv:2102.07623, Table 5 and the authors' code
# (``DigitModel``): 14,219,210 parameters for ten classes, with gamma and beta of its 5
# BatchNorm layers (two of them 1d) and without running statistics. Torch's default
# initialisation; images are (3, 28, 28), and grey images are repeated over three
# channels.

SIDE = 28


class DigitsCNN(nn.Module):
    """Three 5x5 convolutions, pooling after two of them, then three linear layers."""

    def __init__(self, num_classes: int) -> None:
        """Build the layers."""
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, kernel_size=5, padding=2)
        self.norm1 = nn.BatchNorm2d(64)
        self.conv2 = nn.Conv2d(64, 64, kernel_size=5, padding=2)
        self.norm2 = nn.BatchNorm2d(64)
        self.conv3 = nn.Conv2d(64, 128, kernel_size=5, padding=2)
        self.norm3 = nn.BatchNorm2d(128)
        # Two poolings halve each side twice, so the classifier gets 128 x 7 x 7 = 6272
        # values.
        self.fc1 = nn.Linear(128 * (SIDE // 4) ** 2, 2048)
        self.norm4 = nn.BatchNorm1d(2048)
        self.fc2 = nn.Linear(2048, 512)
        self.norm5 = nn.BatchNorm1d(512)
        self.fc = nn.Linear(512, num_classes)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, classes) of images (N, 3, 28, 28)."""
        x = self.pool(self.relu(self.norm1(self.conv1(x))))
        x = self.pool(self.relu(self.norm2(self.conv2(x))))
        x = self.relu(self.norm3(self.conv3(x))).flatten(1)
        x = self.relu(self.norm4(self.fc1(x)))
        logits: Tensor = self.fc(self.relu(self.norm5(self.fc2(x))))
        return logits


# --- the networks of FedBS --------------------------------------------------------------
# The two convolutional networks of FedBS, for the MNISTs and for CIFAR-10.
#
# Source: FedBS, section V-A. MNIST: 5x5 convolutions of 16 and 32 channels, then one
# linear layer on 1568 values. CIFAR: a 5x5 convolution of 100 channels, 3x3 convolutions
# of 150, 250 and 500 channels, then linear layers on 4500, 270 and 150 values. After each
# convolution: BatchNorm, ReLU and 2x2 max pooling.
#
# Ours, because the paper does not define them: padding 2 everywhere (28 and 32 pixels
# then give 1568 and 4500 values), ReLU between the linear layers, biases, and torch's
# default initialisation.


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


def fedbs_mnist(num_classes: int) -> FedBSNet:
    """Return the network for images (1, 28, 28)."""
    return FedBSNet((1, 16, 32), (5, 5), (1568, num_classes))


def fedbs_cifar(num_classes: int) -> FedBSNet:
    """Return the network for images (3, 32, 32)."""
    return FedBSNet(
        (3, 100, 150, 250, 500), (5, 3, 3, 3), (4500, 270, 150, num_classes)
    )
