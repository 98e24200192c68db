"""Residual networks of depth 6n + 2 for small images.

Source: He et al. 2016, arXiv:1512.03385, section 4.2: a 3x3 stem of 16 channels, three
stages of n blocks of two 3x3 convolutions with 16, 32 and 64 channels, global average
pooling, one linear layer. Option A shortcuts take every second position and fill the
new channels with zeros, without parameters. ResNet-20 for three input channels and ten
classes has 271,098 floats, including 1,376 running statistics (Wang, Shi & Chang 2023,
arXiv:2301.02982, Table 3).

Two facts are from the code of arXiv:2301.02982, because He et al. do not define them:
the weights of the convolutions and of the classifier are Kaiming-normal (fan-in, gain
sqrt 2), and half of a shortcut's zero channels come before the old channels, half
after.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.errors import ConfigError

SMALLEST = 32
WIDTHS = (16, 32, 64)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm, added to an option A shortcut.

    The block maps (N, in, S, S) to (N, out, S/stride, S/stride).
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        """Build the branch. The shortcut needs no layers."""
        super().__init__()
        self.conv1 = nn.Conv2d(
            channels_in,
            channels_out,
            kernel_size=3,
            stride=stride,
            padding=1,
            bias=False,
        )
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(
            channels_out, channels_out, kernel_size=3, padding=1, bias=False
        )
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU()
        self.stride = stride
        self.new_channels = channels_out - channels_in

    def shortcut(self, x: Tensor) -> Tensor:
        """Return every ``stride``-th position, with zero channels on both sides."""
        if self.stride == 1 and not self.new_channels:
            return x
        # Put half of the zero channels before the old channels and half after them.
        # ``F.pad`` lists the dimensions from the last to the first: width, height,
        # channels.
        before = self.new_channels // 2
        positions = x[:, :, :: self.stride, :: self.stride]
        return F.pad(positions, (0, 0, 0, 0, before, self.new_channels - before))

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(branch(x) + shortcut(x))."""
        branch = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out: Tensor = self.relu(branch + self.shortcut(x))
        return out


class SmallResNet(nn.Module):
    """The network of depth 6n + 2, for images of any size."""

    def __init__(self, depth: int, num_classes: int, channels: int) -> None:
        """Build the layers, or raise ConfigError if ``depth`` is not 6n + 2."""
        super().__init__()
        blocks, rest = divmod(depth - 2, 6)
        if rest or blocks < 1:
            raise ConfigError(
                "a small residual network has depth 6n + 2 (8, 14, 20, ...), not"
                f" {depth!r}."
            )
        self.conv = nn.Conv2d(channels, WIDTHS[0], kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(WIDTHS[0])
        self.relu = nn.ReLU()
        self.layer1 = _stage(blocks, WIDTHS[0], WIDTHS[0], stride=1)
        self.layer2 = _stage(blocks, WIDTHS[0], WIDTHS[1], stride=2)
        self.layer3 = _stage(blocks, WIDTHS[1], WIDTHS[2], stride=2)
        self.fc = nn.Linear(WIDTHS[2], num_classes)
        # Initialise as in the code of arXiv:2301.02982, instead of with torch's
        # default.
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, classes) of images (N, channels, S, S)."""
        x = self.relu(self.norm(self.conv(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


def _stage(
    blocks: int, channels_in: int, channels_out: int, *, stride: int
) -> nn.Sequential:
    first = BasicBlock(channels_in, channels_out, stride)
    return nn.Sequential(
        first, *(BasicBlock(channels_out, channels_out, 1) for _ in range(blocks - 1))
    )
