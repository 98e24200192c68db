"""Checked files return trees bit for bit, and refuse incomplete or edited files."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save

from fedbn_flwr.checked_file import (
    decode_checked,
    encode_checked,
    encode_safetensors,
    read_checked,
    remove_leftovers,
    write_atomically,
    write_checked,
)
from fedbn_flwr.errors import StateError
from tests.support.folders import contents

TREE = {
    "round": 3,
    "model": {
        "z": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "a": np.array(7),
        "empty": np.zeros((0, 2)),
    },
    "strategy": {
        "deltas": [0.1, float(np.float64(1) / 3)],
        "at": None,
        "variates": {},
        "deep": [{"x": np.ones(2)}],
    },
}


@pytest.fixture
def path(tmp_path) -> Path:
    write_checked(tmp_path / "a.safetensors", TREE)
    return tmp_path / "a.safetensors"


def test_a_tree_comes_back_bit_for_bit(path) -> None:
    def flat(tree: Any):
        if isinstance(tree, dict):
            return [(name, flat(value)) for name, value in tree.items()]
        if isinstance(tree, list):
            return [flat(value) for value in tree]
        if isinstance(tree, np.ndarray):
            return tree.dtype, tree.shape, tree.tolist()
        return tree

    assert flat(read_checked(path)) == flat(TREE), "in its order"
    assert path.stat().st_mode & 0o777 == 0o600


TYPES = ["?", "u1", "i1", "i2", "u2", "f2", "i4", "u4", "f4", "c8", "f8", "i8", "u8"]
ARRAYS = hnp.arrays(
    st.sampled_from(TYPES), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)
)


@given(arrays=st.dictionaries(st.text("abc.", min_size=1), ARRAYS, max_size=8))
@settings(max_examples=100)
def test_bytes_are_those_of_safetensors(arrays: dict[str, np.ndarray]) -> None:
    """With one entry of metadata, the bytes of safetensors do not vary."""
    expected = save(arrays, metadata={"about": "x"})
    in_fortran = {name: np.asarray(a, order="F") for name, a in arrays.items()}
    assert encode_safetensors(in_fortran, {"about": "x"}) == expected


@given(array=hnp.arrays("c16", hnp.array_shapes(min_dims=0, min_side=0)))
@settings(max_examples=50)
def test_complex128_comes_back_although_safetensors_lacks_it(array: np.ndarray) -> None:
    (found,) = decode_checked(encode_checked({"a": array})[0]).values()
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()


@given(share=st.floats(0, 0.999))
@settings(max_examples=40)
def test_an_incomplete_file_is_refused(path, share: float) -> None:
    data = encode_checked(TREE)[0]
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(StateError, match="cannot be read"):
        read_checked(path)


@given(position=st.integers(0, 10**6), flip=st.integers(1, 255))
@settings(max_examples=150)
def test_an_edited_file_is_refused(path, position: int, flip: int) -> None:
    data = bytearray(encode_checked(TREE)[0])
    data[position % len(data)] ^= flip
    path.write_bytes(data)
    with pytest.raises(StateError):
        read_checked(path)


def test_a_full_disk_does_not_change_the_file(path, monkeypatch) -> None:
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=full))
    with pytest.raises(OSError, match="No space left"):
        write_checked(path, {"round": 4})
    assert read_checked(path)["round"] == 3
    assert os.listdir(path.parent) == [path.name]


def test_leftovers_of_a_killed_process_are_removed_and_nothing_else(tmp_path) -> None:
    for name in ("a", ".hidden"):
        write_atomically(tmp_path / name, "whole")
    (tmp_path / ".a.123.tmp").write_text("ha")
    remove_leftovers(tmp_path)
    assert {*os.listdir(tmp_path)} == {".hidden", "a"}


def test_the_temporary_file_of_a_process_that_writes_is_left_alone(
    tmp_path, monkeypatch
) -> None:
    """One client of a state folder cleans up while another client writes."""
    sync = os.fsync

    def clean_up_and_sync(handle: int) -> None:
        remove_leftovers(tmp_path)
        sync(handle)

    monkeypatch.setattr(os, "fsync", clean_up_and_sync)
    write_atomically(tmp_path / "a", "whole")
    assert contents(tmp_path) == {"a": b"whole"}


def test_a_temporary_file_that_is_taken_away_before_it_is_locked_is_made_again(
    tmp_path, monkeypatch
) -> None:
    lock = fcntl.flock

    def late(handle: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        remove_leftovers(tmp_path)
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    write_atomically(tmp_path / "a", "whole", mode=0o600)
    assert contents(tmp_path) == {"a": b"whole"}
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
