"""A client keeps, finds, undoes and refuses states in memory and in a folder."""

from __future__ import annotations

import numpy as np
import pytest

from fedbn_flwr.client.kept import Folder, Memory, Store, find, put, undo_after
from fedbn_flwr.errors import StateError
from fedbn_flwr.messages.protocol import Continuity
from tests.support.in_process import empty_context


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path) -> Store:
    if request.param == "memory":
        return Memory(empty_context())
    return Folder(tmp_path, "r1", 2)


def write(store: Store, server_round: int, value: float, *committed: int) -> str:
    content = {"of": server_round, "a": {"x": np.full(2, value)}}
    return put(store, content, server_round, (server_round - 1, *committed))


def rounds(store: Store) -> list[int]:
    return [int(name.partition(".")[0]) for name in store.names()]


@pytest.mark.parametrize(
    ("missed", "stay"), [([4, 8], [3, 7]), ([4], [3, 8]), ([], [4, 8])]
)
def test_the_newest_two_states_and_those_of_checkpoints_stay(
    missed: list[int], stay: list[int], store
) -> None:
    """There is a checkpoint every 4 rounds, and the last two remain.

    The client misses some rounds.
    """
    for server_round in range(1, 11):
        committed = [r for r in (0, 4, 8) if r < server_round][-2:]
        if server_round not in missed:
            write(store, server_round, server_round, *committed)
    assert rounds(store) == [*stay, 9, 10]
    for name in store.names():
        content = store.read(name)
        assert content["a"]["x"].tolist() == [content["of"]] * 2


def test_a_state_is_found_by_its_hash_and_later_states_are_undone(store) -> None:
    hashes = {number: write(store, number, number, 4, 8) for number in (3, 7, 9)}
    found = find(store, hashes[7])
    assert store.read(found)["of"] == 7
    undo_after(store, found)
    assert rounds(store) == [3, 7], "round 9 will be repeated"
    assert find(store, "unknown") is None
    undo_after(store, None)
    assert rounds(store) == [], "nothing was kept by the checkpoint's round"


def test_states_of_undone_rounds_go_with_the_next_state(store) -> None:
    for server_round in (2, 5, 6):
        write(store, server_round, server_round, 2)
    write(store, 5, 0.5, 6)
    assert rounds(store) == [2, 5]
    assert store.read(store.names()[-1])["a"]["x"].tolist() == [0.5, 0.5]


@pytest.fixture
def folder(tmp_path) -> Folder:
    """Return a folder with the state of round 3."""
    folder = Folder(tmp_path, "r1", 2)
    write(folder, 3, 3)
    return folder


@pytest.mark.parametrize(
    "harm",
    [lambda data: data[:-3], lambda data: data.replace(b'"of', b'"on')],
    ids=["cut", "edited"],
)
def test_a_damaged_file_is_refused_by_name(folder, harm) -> None:
    (path,) = folder._path.iterdir()
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(StateError, match=r"r1/partition-2/000003\."):
        folder.read(path.stem)


@pytest.mark.parametrize("name", ["000003.r1.3.safetensors", "model.safetensors"])
def test_a_folder_of_another_version_is_refused(folder, name: str) -> None:
    (folder._path / name).touch()
    with pytest.raises(StateError, match="written by another version"):
        folder.names()


@pytest.mark.parametrize(
    "run", ["", "..", ".a", "a.b", "a/b", "a\\b", "a b", "x" * 65, "a\n"]
)
def test_a_server_cannot_name_another_folder(run: str) -> None:
    with pytest.raises(StateError, match="must be 1 to 64 letters"):
        Continuity(run)
    with pytest.raises(StateError, match="must be 1 to 64 letters"):
        Continuity.read({"fedbn-flwr.run": run, "fedbn-flwr.committed": ""})


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path) -> None:
    (tmp_path / "r1").write_text("a file in the way")
    said = r"state folder .*partition-2 cannot be written: .*Not a directory.*state-dir"
    with pytest.raises(StateError, match=said):
        write(Folder(tmp_path, "r1", 2), 1, 1)


def test_a_state_that_cannot_be_written_leaves_the_earlier_states(
    folder, monkeypatch
) -> None:
    write(folder, 4, 4)

    def full(*_, **__) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedbn_flwr.client.kept.write_atomically", full)
    with pytest.raises(StateError, match="No space left"):
        write(folder, 5, 5)
    assert rounds(folder) == [3, 4]
