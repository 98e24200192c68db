"""Loaded, kept and refused files of a client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbn_flwr.client.kept_files import Continuity, KeptFiles
from fedbn_flwr.errors import StateError


def folder(
    root: Path,
    run: str = "r1",
    committed: tuple[int, ...] = (),
    fingerprint: str = "f",
    partition: int = 2,
):
    return KeptFiles(root, Continuity("s", run, committed), partition, fingerprint)


def write(root: Path, server_round: int, sha256: str, **options: Any) -> None:
    folder(root, **options).write(
        {"sha256": sha256, "kept": {"a": {"x": np.ones(2)}}}, server_round
    )


def rounds(root: Path) -> list[str]:
    """Return run and round of the remaining files, oldest first."""
    return [
        ".".join(path.name.split(".")[1:3])
        for path in sorted((root / "s/partition-2").glob("*.safetensors"))
    ]


@pytest.mark.parametrize(
    ("missed", "stay"), [((4, 8), (3, 7)), ((4,), (3, 8)), ((), (4, 8))]
)
def test_the_newest_two_files_and_those_of_checkpoints_stay(
    missed: tuple[int, ...], stay: tuple[int, ...], tmp_path: Path
) -> None:
    """There is a checkpoint every 4 rounds, and the last two remain.

    The client misses some rounds.
    """
    for server_round in range(1, 11):
        committed = tuple(r for r in (0, 4, 8) if r < server_round)[-2:]
        if server_round not in missed:
            write(tmp_path, server_round, f"h{server_round}", committed=committed)
    assert rounds(tmp_path) == [f"r1.{number}" for number in (*stay, 9, 10)]
    assert folder(tmp_path).newest()["round"] == 10


def test_a_resumed_run_finds_its_part_and_drops_later_files(tmp_path: Path) -> None:
    for server_round in (3, 7, 9):
        write(tmp_path, server_round, f"h{server_round}", committed=(4, 8))
    assert folder(tmp_path).find("h7")["round"] == 7
    assert rounds(tmp_path) == ["r1.3", "r1.7"], "round 9 will be repeated"
    assert folder(tmp_path).find("unknown") is None
    assert rounds(tmp_path) == ["r1.3", "r1.7"]
    assert folder(tmp_path).find("") is None, (
        "nothing was kept by the checkpoint's round"
    )
    assert rounds(tmp_path) == []


def test_a_new_run_of_the_experiment_starts_from_the_part_of_the_last_run(
    tmp_path: Path,
) -> None:
    write(tmp_path, 40, "old")
    assert folder(tmp_path, "r2").newest()["sha256"] == "old"
    write(tmp_path, 1, "h1", run="r2", committed=(0,))
    write(tmp_path, 2, "h2", run="r2", committed=(0,))
    write(tmp_path, 3, "h3", run="r2", committed=(0,))
    assert rounds(tmp_path) == [
        "r1.40",
        "r2.2",
        "r2.3",
    ], "a resume from round 0 starts from the old part again"
    assert folder(tmp_path, "r2").newest()["sha256"] == "h3"
    assert folder(tmp_path, "r2").find("")["sha256"] == "old"
    assert rounds(tmp_path) == ["r1.40"]


def test_a_run_that_goes_on_after_another_one_began_leaves_its_files(
    tmp_path: Path,
) -> None:
    for server_round in (1, 2):
        write(tmp_path, server_round, f"h{server_round}")
    write(tmp_path, 1, "other", run="r2", committed=(0,))
    assert folder(tmp_path).find("h2")["sha256"] == "h2"
    assert rounds(tmp_path) == ["r1.2", "r2.1"]


@pytest.mark.parametrize(
    "harm", ["cut", "edited", "renamed", "of another client", "of another model"]
)
def test_an_unusable_file_is_named_and_the_previous_one_is_loaded(
    tmp_path: Path, harm: str, caplog
) -> None:
    write(tmp_path, 3, "h3", committed=(3,))
    options = {"of another model": {"fingerprint": "g"}}.get(harm, {})
    write(tmp_path, 7, "h7", committed=(3,), **options)
    newest = max((tmp_path / "s/partition-2").iterdir())
    data = newest.read_bytes()
    if harm == "cut":
        newest.write_bytes(data[:-3])
    elif harm == "edited":
        newest.write_bytes(data.replace(b"h7", b"h8"))
    elif harm == "renamed":
        newest.rename(newest.with_name(newest.name.replace(".7.", ".9.")))
    elif harm == "of another client":
        write(tmp_path, 7, "h7", partition=5)
        (other,) = (tmp_path / "s/partition-5").iterdir()
        newest.write_bytes(other.read_bytes())
    assert folder(tmp_path).newest()["round"] == 3
    assert "000001.r1." in caplog.text
    assert "looking for an earlier file" in caplog.text


@pytest.mark.parametrize(
    "series", ["", "..", ".a", "a/b", "a\\b", "a b", "x" * 65, "a\n"]
)
def test_a_server_cannot_name_another_folder(series: str) -> None:
    with pytest.raises(StateError, match="must be 1 to 64 letters"):
        Continuity(series, "r")
    with pytest.raises(StateError, match="must be 1 to 64 letters"):
        Continuity.read(
            {
                "fedbn-flwr.series": "s",
                "fedbn-flwr.run": series or "/",
                "fedbn-flwr.committed": "",
            }
        )


def test_continuity_survives_a_message() -> None:
    continuity = Continuity("s", "r", (4, 8))
    assert Continuity.read(continuity.write()) == continuity
    assert Continuity.read(Continuity("s", "r").write()) == Continuity("s", "r")
    assert Continuity.read({"server-round": 3}) is None


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("a file in the way")
    with pytest.raises(
        StateError,
        match=(
            r"state folder .*partition-2 cannot be written: .*Not a"
            r" directory.*state-dir"
        ),
    ):
        write(tmp_path, 1, "h1")
