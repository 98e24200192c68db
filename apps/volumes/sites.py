"""The data of a site, ``dataset=apps.volumes.sites:volumes``, and the model,
``model=apps.volumes.sites:unet``.
"""

from __future__ import annotations

import os
from pathlib import Path

import nibabel
import numpy as np
import torch
from monai.networks.nets import UNet
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = ["Volumes", "unet", "volumes"]


class Volumes(Dataset[tuple[Tensor, Tensor]]):
    """The pairs ``NAME_image.nii.gz`` and ``NAME_label.nii.gz`` of a folder, in the
    order of their names.

    An image becomes float32 (1, D, H, W) with mean 0 and deviation 1; a label is the
    class of each voxel, (D, H, W). ``groups`` is the patient, the name before the first
    ``-``.
    """

    def __init__(self, folder: Path) -> None:
        self.images = sorted(folder.glob("*_image.nii*"))
        self.groups = [
            path.name.partition("_")[0].partition("-")[0] for path in self.images
        ]

    def __len__(self) -> int:
        """Return the number of volumes."""
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a volume and its label."""
        path = self.images[index]
        image = np.asarray(nibabel.load(path).dataobj, np.float32)
        label = np.asarray(
            nibabel.load(path.with_name(path.name.replace("_image", "_label"))).dataobj
        )
        image = (image - image.mean()) / (image.std() + 1e-6)
        return torch.from_numpy(image)[None], torch.from_numpy(label.astype(np.int64))


def volumes(site: int | str, part: str) -> Volumes:
    """Return a part of a site's data: of its ``data-path``, or of
    ``$VOLUMES/site-NUMBER``.
    """
    root = (
        Path(site)
        if isinstance(site, str)
        else Path(os.environ["VOLUMES"], f"site-{site}")
    )
    return Volumes(root / part)


def unet(num_classes: int, channels: int) -> nn.Module:
    """Return MONAI's UNet with BatchNorm; other norms replace it (``norm=group``)."""
    model: nn.Module = UNet(
        spatial_dims=3,
        in_channels=channels,
        out_channels=num_classes,
        channels=(8, 16, 32),
        strides=(2, 2),
        num_res_units=1,
        norm="BATCH",
    )
    return model
