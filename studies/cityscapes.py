"""Cityscapes for a run: the folder CITYSCAPES, a site for each training city.

``dataset=studies.cityscapes:city`` with ``task=segmentation`` and ``num-classes=19``.
No validation image is from a training city, so each site tests on a share of them.
"""

import os
from pathlib import Path

import numpy as np
from torch.utils.data import Subset
from torchvision.datasets import Cityscapes
from torchvision.transforms.functional import normalize, to_tensor

# the class of each label id; 255 is ignored
CLASSES = np.full(256, 255, np.uint8)
for one in Cityscapes.classes:
    if 0 <= one.train_id < 19:
        CLASSES[one.id] = one.train_id


def city(site, part, height=512):
    """Return the examples of a site, read when a step uses them."""

    def pair(image, labels):
        pixels = to_tensor(image.resize((2 * height, height)))
        pixels = normalize(pixels, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        return pixels, CLASSES[np.array(labels.resize((2 * height, height), 0))]

    split = "train" if part == "train" else "val"
    data = Cityscapes(
        os.environ["CITYSCAPES"], split, target_type="semantic", transforms=pair
    )
    chosen = sorted(range(len(data)), key=lambda at: data.images[at])
    if part == "test":
        return Subset(data, chosen[site::18])
    cities = [Path(path).parent.name for path in data.images]
    own = sorted({*cities})[site]
    return Subset(data, [at for at in chosen if cities[at] == own])


def small(site, part):
    """Return the examples with 64 x 128 pixels."""
    return city(site, part, 64)


def mobilenet(num_classes, encoder="mobilenet_v2"):
    """Return DeepLab-v3+ with ImageNet's weights (segmentation-models-pytorch)."""
    import segmentation_models_pytorch as smp

    return smp.DeepLabV3Plus(encoder, encoder_weights="imagenet", classes=num_classes)


def resnet50(num_classes):
    """Return DeepLab-v3+ with ResNet-50."""
    return mobilenet(num_classes, "resnet50")


city.input_shape = (3, 512, 1024)
small.input_shape = (3, 64, 128)
