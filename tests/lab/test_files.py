"""Files of a run can be read while it continues."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import StateError
from fedbn_flwr.lab.files import NewLines


def lines(rounds: range) -> str:
    return "".join(
        json.dumps({"round": number, "loss": 1 / number}) + "\n" for number in rounds
    )


def rounds(new: NewLines) -> list[int]:
    return [line["round"] for line in new.read()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_each_complete_line_is_read_once(path: Path) -> None:
    new = NewLines(path)
    assert rounds(new) == []
    path.write_text(lines(range(1, 4)))
    assert rounds(new) == [1, 2, 3]
    text = lines(range(4, 6))
    with path.open("a") as file:
        file.write(text[:-5])
    assert rounds(new) == [4]
    with path.open("a") as file:
        file.write(text[-5:])
    assert rounds(new) == [5]
    assert rounds(new) == []


@pytest.mark.parametrize(
    "replaced_with", [3, 5, 9], ids=["shorter", "as long", "longer"]
)
def test_a_file_that_a_resume_replaced_goes_on_from_its_new_end(
    path: Path, replaced_with: int
) -> None:
    new = NewLines(path)
    path.write_text(lines(range(1, 6)))
    assert rounds(new) == [1, 2, 3, 4, 5]
    # lines of other lengths
    write_atomically(path, lines(range(1, replaced_with + 1)).replace(", ", ",  "))
    assert rounds(new) == [*range(6, replaced_with + 1)]
    with path.open("a") as file:
        file.write(lines(range(replaced_with + 1, replaced_with + 2)))
    assert rounds(new) == [replaced_with + 1]


def test_the_file_of_a_run_that_begins_again_is_read_from_its_first_line(
    path: Path,
) -> None:
    new = NewLines(path)
    path.write_text(lines(range(1, 6)))
    assert rounds(new) == [1, 2, 3, 4, 5]
    path.unlink()
    assert rounds(new) == []
    path.write_text(lines(range(1, 4)))
    assert rounds(new) == [1, 2, 3]


def test_a_long_file_is_not_read_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rereading 40,000 rounds twice a second would take half a core from the runs."""
    new, parsed = NewLines(path), 0
    path.write_text(lines(range(1, 201)))
    new.read()
    loads = json.loads

    def counted(text: str) -> object:
        nonlocal parsed
        parsed += 1
        return loads(text)

    monkeypatch.setattr(json, "loads", counted)
    with path.open("a") as file:
        file.write(lines(range(201, 203)))
    assert rounds(new) == [201, 202]
    assert parsed == 2


def test_a_damaged_line_is_named_by_its_number(path: Path) -> None:
    new = NewLines(path)
    path.write_text(lines(range(1, 3)))
    new.read()
    with path.open("a") as file:
        file.write(lines(range(3, 4)) + "no JSON\n")
    with pytest.raises(StateError, match=r"metrics\.jsonl, line 4, is damaged"):
        new.read()
