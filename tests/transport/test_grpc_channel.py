"""The gRPC channel checks the caller and the message.

An intruder does not change a step.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import grpc
import pytest
import torch

from fedbn_flwr.errors import ConfigError, EngineError
from fedbn_flwr.transport import Barrier
from fedbn_flwr.transport.channel_server import BODY_SECONDS, ChannelServer
from fedbn_flwr.transport.grpc_channel import ChannelReducer

MANY = 5 * 2**20


@pytest.fixture
def server() -> Iterator[ChannelServer]:
    server = ChannelServer("127.0.0.1:0")
    yield server
    server.close()


def raw(
    address: str, token: str | None, frame: bytes, method: str = "/fedbn.Channel/Call"
) -> str:
    """Call as an intruder, and return the name of the refusal or the reply's status."""
    metadata = () if token is None else (("token", token),)
    with grpc.insecure_channel(address) as channel:
        try:
            reply = channel.unary_unary(method)(frame, metadata=metadata, timeout=10)
        except grpc.RpcError as error:
            return error.code().name
    (length,) = struct.unpack_from(">I", reply)
    return json.loads(reply[4 : 4 + length])["status"]


def frame(header: object, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack(">I", len(text)) + text + body


def reducers(server: ChannelServer, tokens, **options) -> list[ChannelReducer]:
    options = {"certificate": server.certificate, "timeout": 10, **options}
    return [
        ChannelReducer(server.address, token, **options) for token in tokens.values()
    ]


@pytest.fixture
def step(server, at_once, steps) -> Callable[..., Any]:
    """Provide ``step(reducers, others=())`` to let the members take a step.

    The other calls run at the same time. It returns all results.
    """

    def run(
        reducers: Sequence[ChannelReducer], others: Sequence[Callable[[], Any]] = ()
    ) -> list[Any]:
        return at_once(
            *others,
            *(
                partial(steps, reducer, {"gradients/0": torch.ones(2)})
                for reducer in reducers
            ),
        )

    return run


def test_calls_without_a_valid_token_are_refused(server, members, step) -> None:
    old, barrier = (
        Barrier(members(1, 1), timeout=10),
        Barrier(members(1, 1), timeout=10),
    )
    expired = server.admit(old)
    server.dismiss(old)
    tokens = server.admit(barrier)
    assert len({*tokens.values(), *expired.values()}) == 4
    assert all(len(token) >= 43 for token in tokens.values()), "256 bits"
    begin = frame({"op": "begin"})
    for token in (None, "", "guess", tokens[100][:-1], *expired.values()):
        assert raw(server.address, token, begin) == "UNAUTHENTICATED", token
    with pytest.raises(EngineError, match=r"UNAUTHENTICATED.*unknown or expired token"):
        reducers(server, expired)[0].begin()
    done = step(reducers(server, tokens))
    assert [attempts for _, _, attempts in done] == [1, 1]
    assert barrier.dropped == old.dropped == {}
    server.dismiss(barrier)
    assert raw(server.address, tokens[100], begin) == "UNAUTHENTICATED", (
        "replayed when the round is over"
    )


def test_a_message_that_is_too_large_is_refused_before_it_is_read(
    server, members, step
) -> None:
    barrier = Barrier(members(1, 1), timeout=60)
    tokens = server.admit(barrier)
    assert raw(server.address, None, bytes(MANY)) in (
        "RESOURCE_EXHAUSTED",
        "UNAUTHENTICATED",
    )
    large, small = reducers(server, tokens)
    with pytest.raises(EngineError, match="RESOURCE_EXHAUSTED"):
        # The client's own size limit refuses to send it.
        large.reduce("gradients/0", torch.ones(MANY // 4))
    said, done = step([small], [partial(raw, server.address, tokens[100], bytes(MANY))])
    assert said == "RESOURCE_EXHAUSTED"
    assert done[1] == 3
    assert list(barrier.dropped) == [100], "nobody waits for the timeout of 60 s"


def test_a_client_that_disconnects_while_it_waits_is_dropped_at_once(
    server, members, at_once, steps
) -> None:
    barrier = Barrier(members(1, 1, 1), timeout=10)
    tokens = server.admit(barrier)
    vanishing, *good = reducers(server, tokens)
    vanishing.begin()
    call = frame(
        {
            "op": "reduce",
            "attempt": 0,
            "tag": "gradients/0",
            "dtype": "float32",
            "shape": [2],
        },
        bytes(8),
    )
    channel = grpc.insecure_channel(server.address)
    waiting = channel.unary_unary("/fedbn.Channel/Call").future(
        call, metadata=(("token", tokens[100]),), timeout=10
    )
    threading.Timer(0.2, waiting.cancel).start()

    def later(reducer: ChannelReducer) -> object:
        time.sleep(0.5)
        return steps(reducer, {"gradients/0": torch.ones(2)})

    done = at_once(*(partial(later, reducer) for reducer in good))
    channel.close()
    assert barrier.dropped == {100: "lost its connection in exchange 'gradients/0'"}
    assert {union for _, union, _ in done} == {3 + 4}


PLAIN = "is not on loopback and has no TLS, so it is refused"
BEYOND = ("0.0.0.0:0", "[::]:0", "192.0.2.1:9000", "localhost.example.org:1", ":9000")


def test_plaintext_is_refused_beyond_loopback() -> None:
    for bind in BEYOND:
        with pytest.raises(ConfigError, match="Plaintext is allowed only on loopback"):
            ChannelServer(bind)
        with pytest.raises(ConfigError, match=PLAIN):
            ChannelReducer(bind, "token", b"", 1)
    for address in ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"):
        ChannelReducer(address, "token", b"", 1)


def test_tls_works_with_a_private_ca(tls_dir, members, at_once, steps) -> None:
    ours, theirs = tls_dir("ours"), tls_dir("theirs")
    server = ChannelServer("0.0.0.0:0", tls_dir=str(ours))
    try:
        server.address = f"127.0.0.1:{server.address.rpartition(':')[2]}"
        barrier = Barrier(members(1, 3), timeout=10)
        tokens = server.admit(barrier)
        assert server.certificate == (ours / "ca.crt").read_bytes()
        wrong, *_ = reducers(
            server, tokens, certificate=(theirs / "ca.crt").read_bytes()
        )
        plain, *_ = reducers(server, tokens, certificate=b"")
        for refused in (wrong, plain):
            with pytest.raises(EngineError, match="UNAVAILABLE"):
                refused.begin()
        done = at_once(
            *(
                partial(steps, s, {"gradients/0": torch.tensor([4.0 * i])})
                for i, s in enumerate(reducers(server, tokens))
            )
        )
        assert [answers["gradients/0"].item() for answers, _, _ in done] == [3.0, 3.0]
        assert barrier.dropped == {}
    finally:
        server.close()


def test_certificates_or_a_port_that_cannot_be_used_are_refused_by_key(
    tls_dir, tmp_path, server
) -> None:
    with pytest.raises(ConfigError, match=f"fedtan-bind='{server.address}'"):
        ChannelServer(server.address)
    with pytest.raises(ConfigError, match=r"fedtan-tls-dir=.*ca.crt"):
        ChannelServer("127.0.0.1:0", tls_dir=str(tmp_path / "nowhere"))
    folder = tls_dir("broken")
    (folder / "server.key").write_text("no key")
    with pytest.raises(ConfigError, match=r"fedtan-bind='127.0.0.1:0'"):
        ChannelServer("127.0.0.1:0", tls_dir=str(folder))


def test_the_server_can_announce_another_address() -> None:
    server = ChannelServer("127.0.0.1:0", "server.example.org:9000")
    assert server.address == "server.example.org:9000"
    server.close()


def test_a_missing_server_is_an_error_at_once() -> None:
    server = ChannelServer("127.0.0.1:0")
    address = server.address
    server.close()
    with pytest.raises(
        EngineError, match=f"channel at {address}: StatusCode.UNAVAILABLE"
    ):
        ChannelReducer(address, "token", b"", 3600).begin()


@pytest.mark.parametrize("timeout", [1, 120])
def test_a_call_lasts_longer_than_the_server_waits(monkeypatch, timeout: int) -> None:
    """Otherwise the first member would be lost together with the late member."""
    channel = mock.MagicMock()
    monkeypatch.setattr(grpc, "insecure_channel", lambda *_: channel)
    call = channel.unary_unary.return_value
    call.return_value = frame({"status": "ok", "attempt": 0, "union": 2})
    ChannelReducer("localhost:1", "token", b"", timeout).begin()
    assert call.call_args.kwargs["timeout"] >= BODY_SECONDS + timeout
