"""All arrays of a message in one piece: one array of bytes, with a manifest in front.

Over a network each array of a message is two objects for Flower, with requests and
database writes of their own, whatever its size. ``in_one_piece`` puts all array records
of a message into one array; ``unpacked`` gives them back, byte for byte and in the same
order. Each copies the bytes once. Records of other kinds stay as they are.

The array is one of uint8: the length of the manifest (8 bytes, little-endian), the
manifest (JSON), then the data of the arrays, one after another without gaps. The
manifest lists the records, each as ``[record, arrays]``; ``arrays`` lists the fields of
Flower's ``Array``, as ``[name, dtype, shape, stype, number of bytes]``. An array begins
where the one before it ends, so no two overlap.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Message, RecordDict

from fedbn_flwr.compat.flower import (
    BufferArray,
    array_of_bytes,
    as_error,
    filled,
    readdressed,
)
from fedbn_flwr.errors import PackingError
from fedbn_flwr.messages.protocol import PACKED
from fedbn_flwr.messages.records import (
    LONGEST_HEADER,
    npy_header,
    npy_layout,
    of_kind,
    view,
)

__all__ = [
    "FORMAT",
    "in_one_piece",
    "is_packed",
    "packed_for",
    "unpacked",
    "unpacked_reply",
]

FORMAT = 1
"""The version of this form, which a node names in its answer to the query."""
_LENGTH = 8  # bytes


def is_packed(content: RecordDict) -> bool:
    """Return whether the arrays of a message are in one piece."""
    return PACKED in content


def in_one_piece(content: RecordDict) -> RecordDict:
    """Return the content of a message with its arrays, if any, in one piece."""
    records = of_kind(content, ArrayRecord)
    if not records:
        return content
    return _with_piece(content, _piece_of(records))


def packed_for(
    messages: Iterable[Message], node_ids: Collection[int]
) -> Iterator[Message]:
    """Yield the messages; those to ``node_ids`` with their arrays in one piece.

    Messages with the same arrays share the piece: it is made once, and Flower computes
    its hash once.
    """
    pieces = {}
    # or another record could get the id of one that has gone
    alive = []
    for message in messages:
        node_id = message.metadata.dst_node_id
        records = of_kind(message.content, ArrayRecord) if node_id in node_ids else None
        if not records:
            yield message
            continue
        same = tuple((key, id(record)) for key, record in records.items())
        if same not in pieces:
            pieces[same] = _piece_of(records)
            alive.append(records)
        # A message of its own: the same one may go to another node, or again.
        content = _with_piece(message.content, pieces[same])
        yield readdressed(message, content, node_id)


def unpacked_reply(reply: Message) -> Message:
    """Return the reply with its array records; an error reply if they are not whole."""
    if not reply.has_content() or not is_packed(reply.content):
        return reply
    try:
        reply.content = unpacked(reply.content)
    except PackingError as error:
        return as_error(reply, str(error))
    return reply


def unpacked(content: RecordDict) -> RecordDict:
    """Return the content of a message as it was before ``in_one_piece``.

    Its array records come first.

    Raises:
        PackingError: there is no manifest, or it does not fit the bytes: a name is
            missing or there twice, a size or a shape is no whole number from 0, there
            are more or fewer bytes, or data of another dtype or shape.
    """
    others = {key: record for key, record in content.items() if key != PACKED}
    try:
        (array,) = of_kind(content, ArrayRecord)[PACKED].values()
        records = _records(view(array))
    except PackingError:
        raise
    # bytes from outside: NumPy's and JSON's parsers may raise anything
    except Exception as error:
        raise PackingError(
            f"arrays in one piece that cannot be read: {type(error).__name__}: {error}"
        ) from error
    # A manifest could put an array record in the place of another record.
    twice = records.keys() & others.keys()
    if twice:
        raise PackingError(
            f"arrays in one piece: record '{min(twice):.80}' is there twice"
        )
    return filled(RecordDict, {**records, **others})


def _piece_of(records: Mapping[str, ArrayRecord]) -> ArrayRecord:
    """Return a record with all arrays of ``records`` in one array."""
    # What is in the piece, and the bytes of each array, which ``join`` copies once.
    manifest = []
    parts = []
    for key, record in records.items():
        arrays = []
        for name, array in record.items():
            data = array.buffer if isinstance(array, BufferArray) else array.data
            arrays.append((name, array.dtype, array.shape, array.stype, len(data)))
            parts.append(data)
        manifest.append((key, arrays))

    # One array for Flower, with the header of NumPy's format as all arrays have it.
    text = json.dumps(manifest, separators=(",", ":")).encode()
    shape = (_LENGTH + len(text) + sum(map(len, parts)),)
    dtype, header = npy_header(np.dtype(np.uint8), shape, False)
    data = b"".join((header, len(text).to_bytes(_LENGTH, "little"), text, *parts))
    return filled(ArrayRecord, {PACKED: array_of_bytes(dtype, shape, data)})


def _with_piece(content: RecordDict, piece: ArrayRecord) -> RecordDict:
    records: dict[str, Any] = {PACKED: piece}
    for key, record in content.items():
        if not isinstance(record, ArrayRecord):
            records[key] = record
    return filled(RecordDict, records)


def _records(piece: np.ndarray[Any, Any]) -> dict[str, ArrayRecord]:
    """Return the array records in a piece."""
    if piece.dtype != np.uint8 or piece.ndim != 1:
        raise PackingError(
            f"arrays in one piece are {piece.dtype} of shape {piece.shape}: one row of"
            " uint8 needed"
        )
    data = piece.data
    # Behind the manifest the data begin; each array begins where the last one ends.
    start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    records: dict[str, ArrayRecord] = {}
    for key, entries in json.loads(bytes(data[_LENGTH:start])):
        _refuse_name("record", key, records)
        arrays: dict[str, FlowerArray] = {}
        for name, dtype, shape, stype, size in entries:
            _refuse_name(f"record '{key}': entry", name, arrays)
            subject = f"arrays in one piece: record '{key}': entry '{name}'"
            # Before the arithmetic: a negative size would read other arrays' bytes.
            if not _counts([size]) or not isinstance(shape, list) or not _counts(shape):
                raise PackingError(
                    f"{subject}: shape {shape!r:.80}, {size!r:.80} bytes: whole numbers"
                    " from 0 needed"
                )
            own = bytes(data[start : start + size])
            array = array_of_bytes(str(dtype), tuple(shape), own, str(stype))
            _refuse_other_data(subject, array)
            arrays[name] = array
            start += size
        records[key] = filled(ArrayRecord, arrays)
    # A slice behind the end is shorter, without an error.
    if start != len(data):
        raise PackingError(
            f"arrays in one piece have {len(data)} bytes, and the manifest names"
            f" {start}"
        )
    return records


def _refuse_name(what: str, name: object, taken: Collection[str]) -> None:
    """Refuse a name that is none, or that is there twice."""
    if not isinstance(name, str):
        raise PackingError(f"arrays in one piece: {what} {name!r:.80}: a name needed")
    if name in taken:
        raise PackingError(f"arrays in one piece: {what} '{name:.80}' is there twice")


def _counts(numbers: Sequence[object]) -> bool:
    """Return whether all are whole numbers from 0; a bool of JSON is none."""
    return all(type(number) is int and number >= 0 for number in numbers)


def _refuse_other_data(subject: str, array: FlowerArray) -> None:
    """Refuse data whose own header names another dtype or shape."""
    end = 10 + int.from_bytes(array.data[8:10], "little")
    layout = npy_layout(array.data[: min(end, LONGEST_HEADER)])
    # Data that are not in NumPy's plain format say neither.
    if layout is None:
        return
    dtype, shape, _ = layout
    if (str(dtype), shape) != (array.dtype, array.shape):
        raise PackingError(
            f"{subject} is {array.dtype} of shape {array.shape}, and its data are"
            f" {dtype} of shape {shape}"
        )
