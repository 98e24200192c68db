"""Networks of torchvision with fewer or narrower layers."""

from __future__ import annotations

from functools import partial

from torchvision.models import DenseNet, ResNet, mobilenet_v2
from torchvision.models.resnet import BasicBlock

VISION = {
    "resnet": partial(ResNet, BasicBlock, [1, 1, 1, 1]),
    "mobilenet_v2": partial(mobilenet_v2, width_mult=0.25, dropout=0.0),
    "densenet": partial(DenseNet, 8, (2, 3, 2), 16),
}
