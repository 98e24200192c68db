"""Files of a run can be read while it continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedbn_flwr.errors import StateError
from fedbn_flwr.lab.results.files import read_metrics


def test_an_incomplete_last_line_is_left_out_and_a_damaged_line_is_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"round": 1}\n{"round": 2}\n{"rou')
    assert [line["round"] for line in read_metrics(path)] == [1, 2]
    path.write_text('{"round": 1}\n{"round": 2}\n3\n')
    with pytest.raises(StateError, match=r"metrics\.jsonl, line 3, is damaged"):
        read_metrics(path)
    path.write_text('{"round": 1}\nno JSON\n')
    with pytest.raises(StateError, match=r"metrics\.jsonl, line 2, is damaged"):
        read_metrics(path)
