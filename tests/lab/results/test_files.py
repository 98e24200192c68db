"""Files of a run can be read while it continues."""

from __future__ import annotations

import time

import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fedbn_flwr.errors import StateError
from fedbn_flwr.lab.config.yaml_text import read_value
from fedbn_flwr.lab.results.files import own_text, read_metrics, safe_cell, safe_table


def test_an_incomplete_last_line_is_left_out_and_a_damaged_line_is_named(
    tmp_path,
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


BOMB = "a0: &a0 [x, x, x, x, x]\n" + "\n".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)
)


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        "[" * 20_000,
        "[" * 20_000 + "]" * 20_000,
        "{a: " * 20_000 + "}" * 20_000,
        "- " * 20_000 + "x",
        "&a [*a]",
        "a0: &a0 x\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 5000)),
    ],
    ids=lambda text: text[:12],
)
def test_a_text_that_grows_is_refused_in_a_second(text: str) -> None:
    began = time.process_time()
    with pytest.raises(yaml.YAMLError, match=r"Use fewer levels|write the values"):
        read_value(text)
    assert time.process_time() - began < 1


@given(st.text("=+-@'a1 ", max_size=4))
def test_no_cell_with_a_name_is_a_formula_and_each_name_returns(name: str) -> None:
    table = safe_table(pd.DataFrame({"site": [name], "value": [-1.5]}))
    assert not table["site"][0].startswith(("=", "+", "-", "@"))
    assert (own_text(table["site"][0]), table["value"][0]) == (name, -1.5)
    assert safe_cell(-1.5) == -1.5
