"""The function of studies/cityscapes.py reads small images in the published layout."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from studies.cityscapes import city

CITIES = {"train": {"bremen": 3, "aachen": 2}, "val": {"lindau": 1, "munster": 2}}
# the published label ids of the classes 0..18
TRAIN_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)


def test_a_site_for_each_city_with_the_published_classes(tmp_path, monkeypatch) -> None:
    """The red value of a pixel is its label id."""
    for part, cities in CITIES.items():
        for number, (name, count) in enumerate(cities.items()):
            for at in range(count):
                draw = np.random.default_rng([number, at])
                ids = draw.integers(0, 34, (4, 8)).astype(np.uint8)
                image = np.stack([ids, 0 * ids, 0 * ids], axis=2)
                for kind, values in (
                    ("leftImg8bit/*_leftImg8bit", image),
                    ("gtFine/*_gtFine_labelIds", ids),
                ):
                    place = kind.replace("*", f"{part}/{name}/{name}_{at:06}_000019")
                    path = tmp_path / f"{place}.png"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(values).save(path)
    monkeypatch.setenv("CITYSCAPES", str(tmp_path))
    assert [len(city(site, "train", 4)) for site in (0, 1)] == [2, 3]
    assert [len(city(site, "test", 4)) for site in range(18)] == [1] * 3 + [0] * 15
    for site, part in ((0, "train"), (1, "train"), (0, "test"), (2, "test")):
        for pixels, classes in city(site, part, 4):
            ids = torch.round((pixels[0] * 0.229 + 0.485) * 255).int()
            assert ids.shape == (4, 8)
            expected = [
                TRAIN_IDS.index(one) if one in TRAIN_IDS else 255
                for one in ids.flatten().tolist()
            ]
            assert classes.flatten().tolist() == expected
    pixels, classes = city(1, "train", 8)[0]
    assert pixels.shape == (3, 8, 16)
    assert classes.shape == (8, 16)
