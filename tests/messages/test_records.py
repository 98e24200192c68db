"""State dicts survive the way through Flower's records."""

from __future__ import annotations

import hashlib
import io
import warnings

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord

from fedbn_flwr.messages.records import (
    decode,
    encode,
    from_record,
    num_bytes,
    state_sha256,
    tensors,
    to_record,
    to_state,
    view,
    views,
)

STATE = {
    "z": torch.tensor([[1.5, float("nan")], [-0.0, float("inf")]]),
    "counter": torch.tensor(2**53 + 1),
    "scalar": torch.tensor(0.1, dtype=torch.float64),
    "double": torch.full((2, 0, 3), 1.0, dtype=torch.float64),
    "half": torch.tensor([1e-7, 65504.0], dtype=torch.float16),
    "wave": torch.tensor([1 - 2j, 0.5j], dtype=torch.complex64),
    "flag": torch.tensor([True, False]),
    "a": torch.arange(4, dtype=torch.int64),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
    "channels last": torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last),
}


def through_flower(record: ArrayRecord) -> ArrayRecord:
    """Rebuild every array from its bytes, as a network does."""
    return ArrayRecord(
        {k: Array(v.dtype, v.shape, v.stype, bytes(v.data)) for k, v in record.items()}
    )


def test_tensors_come_back_bit_for_bit(same_bits) -> None:
    """Strides do not travel, and arrays give the same record."""
    record = to_record(STATE)
    arrays = to_record(to_state(STATE))
    same_bits(tensors(from_record(through_flower(record))), STATE)
    assert list(arrays) == list(STATE)
    for name, tensor in STATE.items():
        plain = encode(tensor.contiguous().numpy()).data
        assert record[name].data == arrays[name].data == plain


def test_bytes_of_floats_and_of_other_entries_are_counted_apart() -> None:
    assert num_bytes(to_record(STATE)) == (
        4 * (4 + 6 + 24) + 8 + 0 + 2 * 2 + 2 * 8,
        8 + 2 + 4 * 8,
    )
    assert num_bytes(ArrayRecord()) == (0, 0)


GRID = np.arange(24.0).reshape(2, 3, 4)
SHAPES = {
    "contiguous": lambda dtype: GRID.astype(dtype),
    "0-dim": lambda dtype: np.asarray(3).astype(dtype),
    "empty": lambda dtype: np.zeros((2, 0, 3), dtype),
    "one of each": lambda dtype: np.ones((1, 1), dtype),
    "Fortran": lambda dtype: np.asfortranarray(GRID.astype(dtype)),
    "transposed": lambda dtype: GRID.astype(dtype).transpose(1, 0, 2),
    "strided": lambda dtype: GRID.astype(dtype)[:, ::-1, ::2],
    "broadcast": lambda dtype: np.broadcast_to(np.ones(3, dtype), (2, 3)),
    "many dimensions": lambda dtype: np.zeros((1,) * 60, dtype),
}
DTYPES = [
    "?",
    "i1",
    "<i2",
    "<i4",
    "<i8",
    "<u8",
    "<f2",
    "<f4",
    "<f8",
    ">f4",
    ">i8",
    "<c8",
    "<c16",
    "g",
    "<U3",
    "M8[s]",
]


@pytest.mark.parametrize("shape", SHAPES)
def test_an_array_is_written_as_numpy_writes_it_and_read_without_a_copy(
    shape: str, same_bits
) -> None:
    for dtype in DTYPES:
        array, out = SHAPES[shape](np.dtype(dtype)), io.BytesIO()
        np.save(out, array)
        written, flowers = encode(array), Array(array)
        assert written.data == out.getvalue(), dtype
        assert vars(written).items() <= vars(flowers).items(), dtype
        read, copy = view(written), decode(written)
        for found in (read, copy):
            same_bits({dtype: found}, {dtype: array})
        assert not read.flags.writeable
        assert copy.flags.writeable
        assert copy.flags.c_contiguous
        assert not np.shares_memory(copy, read)
        if array.size and dtype not in ("<U3", "M8[s]"):  # NumPy reads these
            assert np.shares_memory(read, np.frombuffer(written.data, np.uint8)), dtype


def test_tensors_share_the_memory_of_read_only_arrays_without_a_warning() -> None:
    read = views(to_record({**STATE, "fortran": np.asfortranarray(GRID)}))
    torch.set_warn_always(True)  # torch gives this warning once in a process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = tensors(read)
    finally:
        torch.set_warn_always(False)
    for name, array in read.items():
        assert found[name].numpy().tobytes() == array.tobytes()
        assert found[name].data_ptr() == array.ctypes.data or not array.size, name
    kept = found["z"]
    del read, found
    # The tensor keeps the memory.
    assert torch.equal(kept.nan_to_num(), STATE["z"].nan_to_num())


def test_the_hash_of_a_state_is_that_of_its_names_dtypes_shapes_and_bytes() -> None:
    state = {**to_state(STATE), "fortran": GRID.T, "swapped": GRID.astype(">f4")}
    text = hashlib.sha256()
    for name, array in state.items():
        text.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        text.update(array.tobytes())
    text.update(b"local 2 ab\nlocal 10 cd\n")
    assert state_sha256(state, {"10": "cd", "2": "ab"}) == text.hexdigest()
