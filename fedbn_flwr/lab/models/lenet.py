"""The network of the FixBN experiments on CIFAR-10, a LeNet with BatchNorm.

Source: Zhong, Chen & Chao 2023, arXiv:2303.06530, section 4 and Table F ("LeNet-like
CNN (LeCun et al., 1998)", "LeNet-CNN"). The paper gives no layer table, so layers and
widths are taken from LeNet-5 (LeCun et al. 1998).

Ours, because the paper does not define them: BatchNorm only after each of the two
convolutions, ReLU, max pooling, no padding, convolutions with bias (so without
BatchNorm the network is LeNet), torch's default initialisation.
"""

from __future__ import annotations

from torch import Tensor, nn

SMALLEST = 28


class LeNet(nn.Module):
    """Two blocks of 6 and 16 channels, then 120 - 84 - classes.

    A block is a 5x5 convolution, BatchNorm, ReLU and 2x2 max pooling.
    """

    def __init__(self, num_classes: int, channels: int, size: int) -> None:
        """Build the layers for square images of ``size`` pixels per side."""
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, kernel_size=5)
        self.norm1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 16, kernel_size=5)
        self.norm2 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        # Each convolution without padding shortens a side by 4 pixels, and each pooling
        # halves it.
        side = ((size - 4) // 2 - 4) // 2
        self.fc1 = nn.Linear(16 * side * side, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc = nn.Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, classes) of images (N, channels, size, size)."""
        x = self.pool(self.relu(self.norm1(self.conv1(x))))
        x = self.pool(self.relu(self.norm2(self.conv2(x))))
        x = self.relu(self.fc1(x.flatten(1)))
        x = self.relu(self.fc2(x))
        logits: Tensor = self.fc(x)
        return logits
