"""Packed arrays come back byte for byte, and an unfit manifest is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbn_flwr.compat.flower import BufferArray
from fedbn_flwr.errors import PackingError
from fedbn_flwr.messages.packing import (
    in_one_piece,
    is_packed,
    packed_for,
    unpacked,
    unpacked_reply,
)
from fedbn_flwr.messages.records import encode, to_record

PACKED = "fedbn-flwr.packed"
DTYPES = (
    "?",
    "i1",
    "u1",
    "i2",
    "i4",
    "<i8",
    ">i8",
    "f2",
    "f4",
    "f8",
    ">f4",
    "c8",
    "c16",
)
SHAPES = ((), (0,), (3,), (2, 0, 3), (2, 3))


def array(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(1, 1 + int(np.prod(shape, dtype=int))).reshape(shape).astype(dtype)


def fields(content: RecordDict) -> list:
    """Return the fields of a content in order, and of arrays the sent fields."""
    found = []
    for key, record in content.items():
        if not isinstance(record, ArrayRecord):
            found.append((key, dict(record)))
            continue
        arrays = []
        for name, a in record.items():
            arrays.append((name, a.dtype, a.shape, a.stype, bytes(a.data)))
        found.append((key, arrays))
    return found


def num_objects(item) -> int:
    """Return the number of Flower's objects. Each needs its own requests."""
    return 1 + sum(num_objects(child) for child in (item.children or {}).values())


def content() -> RecordDict:
    arrays = {f"{d}{s}": encode(array(d, s)) for d in DTYPES for s in SHAPES}
    arrays["fortran"] = encode(np.asfortranarray(array("f4", (2, 3))))
    halves = encode(array("u2", (2,))).data.replace(b"<u2", b"<V2")
    buffer = memoryview(encode(array("f8", (4,))).data)
    further = {
        "bfloat16": Array("bfloat16", (2,), "numpy.ndarray", halves),
        "no NumPy": Array("any", (1, 2), "another.type", b"\x00bytes"),
        "nothing": Array("f4", (), "numpy.ndarray", b""),
        "shared": BufferArray("float64", (4,), "numpy.ndarray", buffer),
    }
    records = {
        "arrays": ArrayRecord(arrays),
        "é": ArrayRecord(further),
        "empty": ArrayRecord(),
        "config": ConfigRecord({"b": 1, "a": b"2"}),
        "metrics": MetricRecord({"n": 3}),
    }
    return RecordDict(records)


def test_every_array_comes_back_byte_for_byte_in_one_object() -> None:
    whole = content()
    before = fields(whole)
    piece = in_one_piece(whole)
    assert is_packed(piece)
    assert not is_packed(whole)
    assert [(key, len(record)) for key, record in piece.items()] == [
        (PACKED, 1),
        ("config", 2),
        ("metrics", 1),
    ]
    assert fields(unpacked(piece)) == before == fields(whole)
    assert num_objects(piece) == 1 + 3 + 2 < num_objects(whole)
    sent = piece[PACKED][PACKED]
    travelled = Array(sent.dtype, sent.shape, sent.stype, sent.data)
    assert fields(unpacked(in_place(ArrayRecord({PACKED: travelled})))) == before[:3]
    without = RecordDict({"config": ConfigRecord()})
    assert in_one_piece(without) is without


def test_messages_with_the_same_arrays_share_one_piece() -> None:
    first, second = (to_record({"w": array("f4", (3,))}) for _ in range(2))
    messages = []
    for node_id, record in enumerate((first, first, second, first)):
        content = RecordDict({"arrays": record, "config": ConfigRecord({"a": 1})})
        messages.append(Message(content, node_id, "train"))
    sent = list(packed_for(iter(messages), {0, 1, 2}))
    assert sent[3] is messages[3]
    pieces = [message.content[PACKED] for message in sent[:3]]
    assert pieces[0] is pieces[1] is not pieces[2]
    for number, message in enumerate(sent[:3]):
        assert message.metadata.dst_node_id == number
        whole = messages[number].content
        assert not is_packed(whole)
        assert fields(unpacked(message.content)) == fields(whole)


def test_messages_that_are_made_one_by_one_have_their_own_arrays() -> None:
    """A record may have the address of an earlier record that was deleted."""

    def message(number: int) -> Message:
        arrays = to_record({"w": np.full(3, float(number))})
        return Message(RecordDict({"arrays": arrays}), 1, "train")

    for number, sent in enumerate(packed_for(map(message, range(50)), {1})):
        assert unpacked(sent.content)["arrays"]["w"].numpy()[0] == number
    assert number == 49


ZERO = encode(np.zeros(2, np.float32)).data
SIZE = len(ZERO)
FIELDS = {
    "name": "w",
    "dtype": "float32",
    "shape": [2],
    "stype": "numpy.ndarray",
    "size": SIZE,
}
ENTRY = [*FIELDS.values()]


def forged(manifest: Any, data: bytes = ZERO, **changed: Any) -> RecordDict:
    """Return arrays in one piece with this manifest, a JSON value or its bytes.

    ``length`` replaces the length of the manifest in the piece.
    """
    text = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    whole = changed.get("length", len(text)).to_bytes(8, "little") + text + data
    return rows(np.frombuffer(whole, np.uint8))


def entry(**changed):
    """Return a manifest of one array with some changed fields."""
    return [["arrays", [[*(FIELDS | changed).values()]]]]


def in_place(record) -> RecordDict:
    return RecordDict({PACKED: record})


def rows(values: np.ndarray) -> RecordDict:
    return in_place(ArrayRecord({PACKED: encode(values)}))


DAMAGED = {
    # The two properties below cover other manifests and changed bytes.
    "no array": in_place(ArrayRecord()),
    "two arrays": in_place(ArrayRecord(dict.fromkeys("ab", encode(np.zeros(1))))),
    "no array record": in_place(ConfigRecord({"a": 1})),
    "floats": rows(np.zeros(20)),
    "the right bytes as a column": rows(
        forged(entry())[PACKED][PACKED].numpy().reshape(-1, 1)
    ),
    "not NumPy's format": in_place(
        ArrayRecord({PACKED: Array("uint8", (4,), "numpy.ndarray", b"gar")})
    ),
    "a manifest far beyond the end": forged([], length=2**63),
    "no JSON": forged(b"{"),
    "no text": forged(b"\xff\xfe"),
    "JSON too deep": forged(b"[" * 100_000),
    "JSON of another kind": forged({"arrays": 1}),
    "an entry of four": forged([["arrays", [ENTRY[:4]]]]),
    "a list for a name": forged(entry(name=["w"])),
    "a record twice": forged([["arrays", [ENTRY]], ["arrays", [ENTRY]]], ZERO + ZERO),
    "a record that is there already": RecordDict(
        {**forged(entry()), "arrays": MetricRecord({"a": 1})}
    ),
    "a size that is true": forged(entry(size=True)),
    "a negative size": forged(
        [["arrays", [ENTRY, ["v", *ENTRY[1:4], -SIZE], ["u", *ENTRY[1:]]]]]
    ),
    "bytes that no entry has": forged(entry(), ZERO + b"\0"),
    "another shape": forged(entry(shape=[1, 2])),
    "another dtype": forged(entry(dtype="float64")),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_manifest_that_does_not_fit_is_refused(damage: str) -> None:
    content = DAMAGED[damage]
    with pytest.raises(PackingError) as caught:
        unpacked(content)
    assert caught.value.code == "packing"
    reply = Message(content, reply_to=Message(RecordDict(), 7, "train"))
    refused = unpacked_reply(reply)
    assert not refused.has_content()
    assert refused.error.reason == str(caught.value)
    assert refused.metadata.__dict__ == reply.metadata.__dict__
    assert unpacked_reply(refused) is refused


def test_the_forgery_without_a_change_is_no_forgery() -> None:
    assert fields(unpacked(forged(entry()))) == [
        ("arrays", [("w", "float32", (2,), "numpy.ndarray", ZERO)])
    ]


def refused_or_whole(content: RecordDict) -> None:
    """Check that the content is refused, or unpacked without an error.

    No byte is lost, and none is there twice.
    """
    try:
        found = unpacked(content)
    except PackingError:
        return
    assert not found or fields(unpacked(in_one_piece(found))) == fields(found)
    arrays = [array for record in found.values() for array in record.values()]
    data = b"".join(array.data for array in arrays)
    assert content[PACKED][PACKED].data.endswith(data)


NAMES = st.sampled_from(["w", "v", "u", None])
ENTRIES = st.tuples(
    NAMES,
    st.sampled_from(["float32", "float64", 1]),
    st.sampled_from([[2], [2], [1, 2], [-2], "2", []]),
    st.just("numpy.ndarray"),
    st.sampled_from([SIZE, SIZE, 0, -SIZE, 2 * SIZE, 1, "a"]),
)
MANIFESTS = st.lists(st.tuples(NAMES, st.lists(ENTRIES, max_size=3)), max_size=3)


@settings(max_examples=100)
@given(manifest=MANIFESTS, arrays=st.integers(0, 3))
def test_any_manifest_is_refused_or_fits(manifest, arrays: int) -> None:
    refused_or_whole(forged(manifest, arrays * ZERO))


@settings(max_examples=150)
@given(
    place=st.integers(0, 10**6),
    value=st.integers(0, 255),
    cut=st.integers(0, 10**6) | st.none(),
)
def test_any_changed_byte_or_cut_is_refused_or_fits(
    place: int, value: int, cut: int | None
) -> None:
    record = to_record({"w": array("f4", (2,)), "n": array("<i8", ())})
    piece = in_one_piece(RecordDict({"arrays": record}))
    values = piece[PACKED][PACKED].numpy()
    values[place % (len(values) // 3 if place % 2 else len(values))] = value
    refused_or_whole(rows(values if cut is None else values[: cut % len(values)]))
