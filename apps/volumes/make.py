"""Write volumes of three sites as NIfTI files: ``python -m apps.volumes.make FOLDER``.

Each volume has a bright ball, class 1. The sites have other scanners: contrast, offset,
noise and blur differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nibabel
import numpy as np
from scipy.ndimage import gaussian_filter

SIZE, COUNTS = 32, {"train": 6, "test": 2}
# contrast, offset, noise and blur of each site's scanner
SCANNERS = ((1.0, 0.0, 0.2, 0.0), (3.0, 100.0, 1.0, 1.0), (-1.0, 5.0, 0.3, 0.5))


def make(folder: Path) -> None:
    """Write the volumes of all sites."""
    axes = np.indices((SIZE, SIZE, SIZE))
    for site, (contrast, offset, noise, blur) in enumerate(SCANNERS):
        for part, count in COUNTS.items():
            target = folder / f"site-{site}" / part
            target.mkdir(parents=True)
            for number in range(count):
                draw = np.random.default_rng([site, number, part == "test"])
                centre, radius = draw.uniform(10, SIZE - 10, 3), draw.uniform(5, 8)
                ball = ((axes - centre[:, None, None, None]) ** 2).sum(0) < radius**2
                image = (
                    gaussian_filter(ball.astype(np.float32), blur)
                    if blur
                    else ball.astype(np.float32)
                )
                image = (
                    contrast * (image + noise * draw.normal(size=ball.shape)) + offset
                )
                name = f"{part}{number}-0"
                for kind, values in (
                    ("image", image.astype(np.float32)),
                    ("label", ball.astype(np.uint8)),
                ):
                    nibabel.save(
                        nibabel.Nifti1Image(values, np.eye(4)),
                        target / f"{name}_{kind}.nii.gz",
                    )


if __name__ == "__main__":
    make(Path(sys.argv[1]))
