"""The digits network of FedBN, with BatchNorm after every layer except the last.

Source: Li et al. 2021, arXiv:2102.07623, Table 5 and the authors' code
(``DigitModel``): 14,219,210 parameters for ten classes, with gamma and beta of its 5
BatchNorm layers (two of them 1d) and without running statistics. Torch's default
initialisation; images are (3, 28, 28), and grey images are repeated over three
channels.
"""

from __future__ import annotations

from torch import Tensor, nn

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
