"""The picture and the table of a split."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.picture import partition_picture, partition_table

COUNTS = np.array([[10, 0, 5], [1, 20, 0]])


def pixels(png: bytes) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(png)).convert("RGB"))


def test_the_table() -> None:
    assert partition_table(COUNTS).splitlines() == [
        "client   0   1  2  all",
        "     0  10   0  5   15",
        "     1   1  20  0   21",
        "   all  11  20  5   36",
    ]
    assert partition_table(COUNTS, ["amazon", "b", "c"]).splitlines()[0] == "client  amazon   b  c  all"


def test_with_many_classes_the_table_shows_their_number_and_the_largest() -> None:
    counts = np.zeros((2, 100), np.int64)
    counts[0, [3, 7]] = 5, 6
    counts[1, 99] = 40
    assert partition_table(counts).splitlines() == [
        "client  classes  largest  all",
        "     0        2     7: 6   11",
        "     1        1   99: 40   40",
        "   all        3   99: 40   51",
    ]


def test_the_picture_is_a_png_that_depends_only_on_counts_and_title() -> None:
    png = partition_picture(COUNTS, "classes, 2 clients")
    assert png.startswith(b"\x89PNG")
    assert png == partition_picture(COUNTS, "classes, 2 clients")
    assert png != partition_picture(COUNTS, "another")
    assert png != partition_picture(COUNTS + np.eye(2, 3, dtype=np.int64), "classes, 2 clients")
    assert png != partition_picture(COUNTS, "classes, 2 clients", ["a", "b", "c"])


def test_clients_are_columns_and_class_0_is_at_the_bottom() -> None:
    """One client holds one class: the dark field lies where it should, empty fields are white."""
    counts = np.zeros((30, 30), np.int64)
    counts[25, 4] = 9  # 900 fields: no numbers are written
    image = pixels(partition_picture(counts)).astype(int)
    rows, columns = np.nonzero((image == (8, 48, 107)).all(2))  # the darkest blue; the colour bar has some on top
    in_axes = columns < image.shape[1] * 0.8
    height, width = image.shape[:2]
    assert rows[in_axes].min() > 0.7 * height
    assert columns[in_axes].min() > 0.5 * width
    assert in_axes.sum() > 50
    assert (image == 255).all(2).mean() > 0.7


@pytest.mark.parametrize("shape", [(100, 10), (5, 1000), (1, 1)])
def test_pictures_of_large_and_small_splits_have_a_reasonable_size(shape: tuple[int, int]) -> None:
    height, width = pixels(partition_picture(np.ones(shape, np.int64), "t")).shape[:2]
    assert 100 < height <= 1600
    assert 200 < width <= 1600


@pytest.mark.parametrize("draw", [partition_picture, partition_table])
def test_counts_that_are_not_a_table_are_refused(draw) -> None:
    for counts, names in ((np.zeros(3, np.int64), ()), (np.zeros((0, 3), np.int64), ()), (COUNTS, ("a",))):
        with pytest.raises(DataError, match=r"counts of shape .* \(clients, classes\), a name each"):
            draw(counts, names=names)
