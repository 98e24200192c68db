"""The picture and the table of a split."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from fedbn_flwr.lab.data.picture import partition_picture, partition_table

COUNTS = np.array([[10, 0, 5], [1, 20, 0]])


def pixels(png: bytes) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(png)).convert("RGB"))


def test_the_table() -> None:
    assert partition_table(COUNTS).splitlines() == [
        "client  0  1  2  all",
        "     0 10  0  5   15",
        "     1  1 20  0   21",
        "   all 11 20  5   36",
    ]
    assert (
        partition_table(COUNTS, ["amazon", "b", "c"]).splitlines()[0]
        == "client  amazon  b  c  all"
    )


def test_with_many_classes_the_table_shows_their_number_and_the_largest() -> None:
    counts = np.zeros((2, 100), np.int64)
    counts[0, [3, 7]] = 5, 6
    counts[1, 99] = 40
    assert partition_table(counts).splitlines() == [
        "client  classes largest  all",
        "     0        2       7   11",
        "     1        1      99   40",
        "   all        3      99   51",
    ]


def test_the_picture_is_a_png_that_depends_only_on_counts_title_and_names() -> None:
    png = partition_picture(COUNTS, "classes, 2 clients")
    assert png.startswith(b"\x89PNG")
    assert png == partition_picture(COUNTS, "classes, 2 clients")
    assert png != partition_picture(COUNTS, "another")
    assert png != partition_picture(
        COUNTS + np.eye(2, 3, dtype=np.int64), "classes, 2 clients"
    )
    assert png != partition_picture(COUNTS, "classes, 2 clients", ["a", "b", "c"])


@pytest.mark.parametrize("shape", [(100, 10), (5, 300), (1, 1)])
def test_pictures_of_large_and_small_splits_have_a_reasonable_size(
    shape: tuple[int, int],
) -> None:
    height, width = pixels(partition_picture(np.ones(shape, np.int64), "t")).shape[:2]
    assert 100 < height <= 1600
    assert 200 < width <= 1600
