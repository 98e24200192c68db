"""``dataset=NAME`` has images at two sites, with a class for each pixel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.support.tables import generator_of

NAME = f"{__name__}:images"
DATA = {"dataset": NAME, "task": "segmentation", "num-classes": 19}
SETTINGS = {**DATA, "num-clients": 2}
COUNTS = {"train": (2, 3), "test": (1, 2)}


def images(site: int, part: str) -> TensorDataset:
    """Return images of 64 x 128 pixels. Red is the class of 16 x 32 pixels."""
    shape, draw = (COUNTS[part][site], 4, 4), generator_of(site, part)
    classes = torch.randint(0, 19, shape, generator=draw)
    classes = classes.repeat_interleave(16, 1).repeat_interleave(32, 2)
    classes[:, 0, 0] = 255  # ignored
    pixels = torch.stack([classes / 19, 0 * classes, 0 * classes], 1)
    return TensorDataset(pixels.float(), classes)


images.input_shape = (3, 64, 128)  # type: ignore[attr-defined]


def lraspp(num_classes: int) -> nn.Module:
    """Return torchvision's small segmenter, with its logits alone as output."""
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    class Segmenter(nn.Module):
        """The network whose output is the entry "out" of torchvision's output."""

        def __init__(self) -> None:
            super().__init__()
            self.model = lraspp_mobilenet_v3_large(
                weights=None, weights_backbone=None, num_classes=num_classes
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)["out"]

    return Segmenter()
