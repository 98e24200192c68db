"""All arrays of a message packed into one array of bytes, after a manifest.

Over a network, Flower handles each array of a message as two objects, with their own
requests and database writes, even if the array is small. ``in_one_piece`` puts all
array records of a message into one array. ``unpacked`` restores them, byte for byte and
in the same order. Each function copies the bytes once. Records of other kinds do not
change.

The array has dtype uint8. It contains the length of the manifest (8 bytes,
little-endian), the manifest (JSON), and the data of the arrays, one after another
without gaps. The manifest lists the records as ``[record, arrays]``; ``arrays`` lists
the fields of Flower's ``Array`` as ``[name, dtype, shape, stype, number of bytes]``.
Each array begins at the end of the array before it, so arrays cannot overlap.
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
    changed,
    filled,
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

FORMAT = 1
"""The version of this format; a node reports it in its answer to the query."""
_LENGTH = 8  # bytes that contain the length of the manifest


def is_packed(content: RecordDict) -> bool:
    """Return whether the arrays of a message are packed."""
    return PACKED in content


def in_one_piece(content: RecordDict) -> RecordDict:
    """Return the content of a message with its arrays, if any, packed."""
    records = of_kind(content, ArrayRecord)
    if not records:
        return content
    return _with_piece(content, _piece_of(records))


def packed_for(
    messages: Iterable[Message], node_ids: Collection[int]
) -> Iterator[Message]:
    """Yield the messages, with packed arrays for the nodes in ``node_ids``.

    Messages with the same arrays share the packed array: it is created once, and Flower
    computes its hash once.
    """
    pieces = {}
    # Keep the records alive. Otherwise, another record could get the id of a deleted
    # record.
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
        # Make a new message, because the original may go to another node or be sent
        # again.
        content = _with_piece(message.content, pieces[same])
        yield changed(message, content, dst_node_id=node_id)


def unpacked_reply(reply: Message) -> Message:
    """Return the reply with its array records, or an error reply if that fails."""
    if not reply.has_content() or not is_packed(reply.content):
        return reply
    try:
        reply.content = unpacked(reply.content)
    except PackingError as error:
        return as_error(reply, str(error))
    return reply


def unpacked(content: RecordDict) -> RecordDict:
    """Return the content that a message had before ``in_one_piece``.

    In the returned content, the array records come first.

    Raises:
        PackingError: the manifest is missing or does not fit the bytes. For example, a
            name is missing or repeated, a size or a shape is negative or not a whole
            number, the number of bytes is wrong, or data have another dtype or shape.
    """
    others = {key: record for key, record in content.items() if key != PACKED}
    try:
        (array,) = of_kind(content, ArrayRecord)[PACKED].values()
        records = _records(view(array))
    except PackingError:
        raise
    # the bytes come from outside: NumPy's and JSON's parsers may raise any exception
    except Exception as error:
        raise PackingError(
            f"packed arrays cannot be read: {type(error).__name__}: {error}"
        ) from error
    # Refuse a name that exists twice, because a manifest could replace another record
    # by an array record.
    twice = records.keys() & others.keys()
    if twice:
        raise PackingError(f"packed arrays: record '{min(twice):.80}' exists twice")
    return filled(RecordDict, {**records, **others})


def _piece_of(records: Mapping[str, ArrayRecord]) -> ArrayRecord:
    """Return a record with all arrays of ``records`` in one array."""
    # Collect the manifest and the bytes of each array; ``join`` copies them once.
    manifest = []
    parts = []
    for key, record in records.items():
        arrays = []
        for name, array in record.items():
            data = array.buffer if isinstance(array, BufferArray) else array.data
            arrays.append((name, array.dtype, array.shape, array.stype, len(data)))
            parts.append(data)
        manifest.append((key, arrays))

    # Make a single array for Flower, with the usual header of NumPy's format.
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
    """Return the array records in a packed array."""
    if piece.dtype != np.uint8 or piece.ndim != 1:
        raise PackingError(
            f"packed arrays are {piece.dtype} of shape {piece.shape}; they must be one"
            " row of uint8"
        )
    data = piece.data
    # The data begin after the manifest; each array begins at the end of the last array.
    start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    records: dict[str, ArrayRecord] = {}
    for key, entries in json.loads(bytes(data[_LENGTH:start])):
        _refuse_name("record", key, records)
        arrays: dict[str, FlowerArray] = {}
        for name, dtype, shape, stype, size in entries:
            _refuse_name(f"record '{key}': entry", name, arrays)
            subject = f"packed arrays: record '{key}': entry '{name}'"
            # Check the numbers first, because a negative size would read other bytes.
            if not _counts([size]) or not isinstance(shape, list) or not _counts(shape):
                raise PackingError(
                    f"{subject} has shape {shape!r:.80} and {size!r:.80} bytes; these"
                    " must be whole numbers, not negative"
                )
            own = bytes(data[start : start + size])
            array = array_of_bytes(str(dtype), tuple(shape), own, str(stype))
            _refuse_other_data(subject, array)
            arrays[name] = array
            start += size
        records[key] = filled(ArrayRecord, arrays)
    # Compare the lengths, because a slice beyond the end is shorter and raises no
    # error.
    if start != len(data):
        raise PackingError(
            f"packed arrays have {len(data)} bytes, but the manifest describes {start}"
        )
    return records


def _refuse_name(what: str, name: object, taken: Collection[str]) -> None:
    """Refuse a name that is not a text or is repeated."""
    if not isinstance(name, str):
        raise PackingError(
            f"packed arrays: {what} {name!r:.80}: the name must be a text"
        )
    if name in taken:
        raise PackingError(f"packed arrays: {what} '{name:.80}' exists twice")


def _counts(numbers: Sequence[object]) -> bool:
    """Return whether all numbers are whole and >= 0, and none is a JSON bool."""
    return all(type(number) is int and number >= 0 for number in numbers)


def _refuse_other_data(subject: str, array: FlowerArray) -> None:
    """Refuse data with a header that contradicts the manifest."""
    end = 10 + int.from_bytes(array.data[8:10], "little")
    layout = npy_layout(array.data[: min(end, LONGEST_HEADER)])
    # Skip data that are not in NumPy's plain format, because they have no such header.
    if layout is None:
        return
    dtype, shape, _ = layout
    if (str(dtype), shape) != (array.dtype, array.shape):
        raise PackingError(
            f"{subject} is {array.dtype} of shape {array.shape}, but its data are"
            f" {dtype} of shape {shape}"
        )
