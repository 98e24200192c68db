"""A small network for signals such as an ECG, with an average over time.

Source: the layers of the FCN of Wang, Yan & Oates 2017, "Time Series Classification
from Scratch with Deep Neural Networks: A Strong Baseline", arXiv:1611.06455, section
2.B: blocks of convolution, BatchNorm and ReLU with kernels of 8, 5 and 3, then global
average pooling and a linear classifier.

Ours: 32, 64 and 32 channels instead of 128, 256 and 128, and a first kernel of 7, so
that a signal keeps its length.
"""

from __future__ import annotations

from torch import Tensor, nn


class SignalCNN(nn.Module):
    """Three blocks of convolution, BatchNorm and ReLU, for signals of any length."""

    def __init__(self, num_classes: int, channels: int) -> None:
        """Build the layers for signals with this number of channels."""
        super().__init__()
        self.conv1 = nn.Conv1d(channels, 32, kernel_size=7, padding=3)
        self.norm1 = nn.BatchNorm1d(32)
        self.conv2 = nn.Conv1d(32, 64, kernel_size=5, padding=2)
        self.norm2 = nn.BatchNorm1d(64)
        self.conv3 = nn.Conv1d(64, 32, kernel_size=3, padding=1)
        self.norm3 = nn.BatchNorm1d(32)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, classes) of signals (N, channels, length)."""
        x = self.relu(self.norm1(self.conv1(x)))
        x = self.relu(self.norm2(self.conv2(x)))
        x = self.relu(self.norm3(self.conv3(x)))
        # The average over time makes the classifier independent of the length.
        logits: Tensor = self.fc(x.mean(2))
        return logits
