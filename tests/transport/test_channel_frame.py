"""Every frame that a member may not send is refused, and nothing else happens."""

from __future__ import annotations

import asyncio
import json
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from fedbn_flwr.errors import EngineError
from fedbn_flwr.transport import Barrier, RetryStep
from fedbn_flwr.transport.channel_frame import Call, ReplyHeader, pack, unpack
from fedbn_flwr.transport.channel_server import answer
from fedbn_flwr.transport.grpc_channel import ChannelReducer

PATIENCE = 20


def frame(header: object, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(4, "big") + text + body


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
)


def mostly(*usual) -> st.SearchStrategy:
    return st.sampled_from(usual) | anything


headers = st.fixed_dictionaries(
    {},
    optional={
        "op": mostly("reduce", "begin", "close"),
        "attempt": mostly(0, 1, math.inf, -1, 2**31),
        "tag": mostly(
            "mean/0", "gradients/1/a", "mean/\ud800", "moments/0", "variance/0"
        ),
        "dtype": mostly("float32", "float64", "object"),
        "shape": mostly([2], [3, 1], [-1], [0], [], [2**62, 0]),
        "more": anything,
    },
)
whole = st.builds(
    frame, headers, st.binary(max_size=32) | st.just(bytes(8)) | st.just(b"\xff" * 8)
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(pack(Call(op="reduce", tag="mean/0"), torch.ones(2)))
    for _ in range(draw(st.integers(0, 3))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))])


frames = st.binary(max_size=64) | whole | damaged()


@pytest.mark.parametrize("number", [50, pytest.param(100_000, marks=pytest.mark.slow)])
def test_every_frame_gets_a_reply_or_drops_its_sender_at_once(
    members, number: int
) -> None:
    """The two waiting members get their answer after any frame, or try again.

    They try again without the sender of a bad frame.
    """

    @settings(max_examples=number)
    @given(frames)
    def hold(data: bytes) -> None:
        barrier = Barrier(members(1, 1, 1), timeout=3600)
        others = {}
        then = others.update
        for node_id in (100, 101):
            barrier.send(node_id, 0, "mean/0", torch.ones(2), then)
        waiting = asyncio.wait_for(answer(barrier, 102, data), PATIENCE)
        try:
            reply, _ = unpack(ReplyHeader, loop.run_until_complete(waiting))
        except ValueError:
            assert list(barrier.dropped) == [102], "at once"
            kinds = {node_id: type(one) for node_id, one in others.items()}
            assert kinds == {100: RetryStep, 101: RetryStep}
            return
        call, _ = unpack(Call, data)
        late = call.op == "begin" or reply.status == "retry"  # it may still send
        assert late or others.keys() == {100, 101}

    loop = asyncio.new_event_loop()
    hold()
    loop.close()


@pytest.mark.parametrize("kind", [Call, ReplyHeader])
def test_reading_raises_nothing_but_value_errors(kind) -> None:
    @settings(max_examples=50)
    @given(frames)
    def hold(data: bytes) -> None:
        text = ""
        try:
            unpack(kind, data)
        except ValueError as error:
            text = str(error)
        assert text.isprintable(), "it goes into logs"

    hold()


def test_a_reply_that_cannot_be_read_is_an_error_of_the_channel(monkeypatch) -> None:
    reducer = ChannelReducer("127.0.0.1:1", "token", b"", 10)
    monkeypatch.setattr(reducer, "_call", lambda *args, **kwargs: b"\x00\x00\x00\x02[]")
    with pytest.raises(EngineError, match="cannot be read"):
        reducer.begin()


@pytest.mark.filterwarnings("error")
def test_the_tensor_of_a_frame_has_memory_of_its_own() -> None:
    data = pack(ReplyHeader(status="ok"), torch.zeros(3))
    _, tensor = unpack(ReplyHeader, data)
    tensor += 1
    assert torch.equal(unpack(ReplyHeader, data)[1], torch.zeros(3))


def test_an_answer_without_a_tensor_is_an_error_of_the_channel(monkeypatch) -> None:
    reducer = ChannelReducer("127.0.0.1:1", "token", b"", 1.0)
    reducer._attempt = 0
    monkeypatch.setattr(reducer, "_ask", lambda *_: (ReplyHeader(status="ok"), None))
    with pytest.raises(EngineError, match="'mean/0' without a tensor"):
        reducer.reduce("mean/0", torch.ones(2))
