"""The table of a split."""

from __future__ import annotations

import numpy as np

from fedbn_flwr.lab.data.split_table import partition_table

COUNTS = np.array([[10, 0, 5], [1, 20, 0]])


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
