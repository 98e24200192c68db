"""AlexNet as FedBN trains it, and a small variant for 64 pixels.

BatchNorm is after every layer except the last.

Source: Krizhevsky et al. 2012 in the form of Li et al. 2021, arXiv:2102.07623, Table 6
and the authors' code (``AlexNet``), for Office-Caltech10 and DomainNet at 256 pixels:
57,063,498 parameters for ten classes, 7 BatchNorm layers, two of them 1d. FedTAN and
FedWon use it too. Torch's default initialisation, no dropout.

Ours: ``alexnet-bn-small`` has the same order of layers with half the channels in the
convolutions, 512 in the linear layers, a 5x5 stem of stride 2, and 3x3 instead of 6x6
positions before the classifier: 1,475,626 parameters. At 64 pixels, the last
convolutions of the full network get 3x3 positions, and its 6x6 positions before the
classifier are copies of one value per channel.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


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
