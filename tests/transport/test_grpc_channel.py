"""The gRPC channel checks the caller and the message.

An intruder does not change a step.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from functools import partial
from unittest import mock

import grpc
import pytest
import torch

from fedbn_flwr.errors import ConfigError, EngineError
from fedbn_flwr.transport import Barrier
from fedbn_flwr.transport.channel_frame import Call, pack
from fedbn_flwr.transport.channel_server import BODY_SECONDS, ChannelServer
from fedbn_flwr.transport.grpc_channel import ChannelReducer

CALL, MANY = "/fedbn.Channel/Call", 5 * 2**20


SENT = {"gradients/0": torch.ones(2)}


def begun(server: ChannelServer, token: str | None, body: bytes = b"") -> str:
    """Call as an intruder, and return the name of the refusal or the reply's status.

    The bytes of the call are written by hand, and ``begin`` is the default.
    """
    text = b'{"op": "begin"}'
    metadata = () if token is None else (("token", token),)
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(CALL)
        frame = body or struct.pack(">I", len(text)) + text
        try:
            reply = call(frame, metadata=metadata, timeout=10)
        except grpc.RpcError as error:
            return error.code().name
    (length,) = struct.unpack_from(">I", reply)
    return json.loads(reply[4 : 4 + length])["status"]


def reducers(server: ChannelServer, tokens, **options) -> list[ChannelReducer]:
    options = {"certificate": server.certificate, "timeout": 10, **options}
    return [
        ChannelReducer(server.address, token, **options) for token in tokens.values()
    ]


def test_calls_without_a_valid_token_are_refused(
    server, members, at_once, steps
) -> None:
    old, barrier = (Barrier(members(1, 1), timeout=10) for _ in range(2))
    expired = server.admit(old)
    server.dismiss(old)
    tokens = server.admit(barrier)
    assert len({*tokens.values(), *expired.values()}) == 4
    assert all(len(token) >= 43 for token in tokens.values()), "256 bits"
    for token in (None, "", "guess", tokens[100][:-1], *expired.values()):
        assert begun(server, token) == "UNAUTHENTICATED", token
    with pytest.raises(EngineError, match=r"UNAUTHENTICATED.*unknown or expired token"):
        reducers(server, expired)[0].begin()
    assert begun(server, tokens[100]) == "ok"
    done = at_once(*(partial(steps, one, SENT) for one in reducers(server, tokens)))
    assert [attempts for _, _, attempts in done] == [1, 1]
    assert barrier.dropped == old.dropped == {}
    server.dismiss(barrier)
    # A call that is replayed when the round is over.
    assert begun(server, tokens[100]) == "UNAUTHENTICATED"


def test_a_message_that_is_too_large_is_refused_before_it_is_read(
    server, members, at_once, steps
) -> None:
    barrier = Barrier(members(1, 1), timeout=60)
    tokens = server.admit(barrier)
    refused = begun(server, None, bytes(MANY))
    assert refused in ("RESOURCE_EXHAUSTED", "UNAUTHENTICATED")
    large, small = reducers(server, tokens)
    with pytest.raises(EngineError, match="RESOURCE_EXHAUSTED"):
        # The client's own size limit refuses to send it.
        large.reduce("gradients/0", torch.ones(MANY // 4))
    said, done = at_once(
        partial(begun, server, tokens[100], bytes(MANY)), partial(steps, small, SENT)
    )
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
    channel = grpc.insecure_channel(server.address)
    waiting = channel.unary_unary(CALL).future(
        pack(Call(op="reduce", tag="gradients/0"), torch.ones(2)),
        metadata=(("token", tokens[100]),),
        timeout=10,
    )
    threading.Timer(0.2, waiting.cancel).start()

    def later(reducer: ChannelReducer) -> object:
        time.sleep(0.5)
        return steps(reducer, SENT)

    done = at_once(*(partial(later, reducer) for reducer in good))
    channel.close()
    assert barrier.dropped == {100: "lost its connection in exchange 'gradients/0'"}
    assert {union for _, union, _ in done} == {3 + 4}


BEYOND = ("0.0.0.0:0", "[::]:0", "192.0.2.1:9000", "localhost.example.org:1", ":9000")


def test_plaintext_is_refused_beyond_loopback() -> None:
    for bind in BEYOND:
        with pytest.raises(ConfigError, match="Plaintext is allowed only on loopback"):
            ChannelServer(bind)
        with pytest.raises(ConfigError, match="is not on loopback and has no TLS"):
            ChannelReducer(bind, "token", b"", 1)
    for address in ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"):
        ChannelReducer(address, "token", b"", 1)


def test_tls_works_with_a_private_ca(tls_dir, members, honest) -> None:
    ours, theirs = tls_dir("ours"), tls_dir("theirs")
    server = ChannelServer("0.0.0.0:0", tls_dir=str(ours))
    try:
        server.address = f"127.0.0.1:{server.address.rpartition(':')[2]}"
        barrier = Barrier(members(1, 3), timeout=10)
        tokens = server.admit(barrier)
        assert server.certificate == (ours / "ca.crt").read_bytes()
        for certificate in ((theirs / "ca.crt").read_bytes(), b""):
            refused, *_ = reducers(server, tokens, certificate=certificate)
            with pytest.raises(EngineError, match="UNAVAILABLE"):
                refused.begin()
        assert honest(server, tokens.values()) == [3.0, 3.0]
        assert barrier.dropped == {}
    finally:
        server.close()


def test_certificates_or_a_port_that_cannot_be_used_are_refused_by_key(
    tls_dir, tmp_path, server
) -> None:
    """Each reason has its own text, though gRPC has one text for all."""
    folder = tls_dir("broken")
    (folder / "server.key").write_text("no key")
    reasons = set()
    for bind, certificates in (
        (server.address, ""),
        ("127.0.0.1:0", tmp_path / "nowhere"),
        ("127.0.0.1:0", folder),
        ("203.0.113.9:0", tls_dir("whole")),  # the address of no machine
    ):
        with pytest.raises(ConfigError, match=f"fedtan-bind='{bind}'") as caught:
            ChannelServer(bind, tls_dir=str(certificates))
        named = f"fedtan-tls-dir='{certificates}': "
        reasons.add(str(caught.value).partition(named)[2])
    assert len(reasons) == 4
    assert not [reason for reason in reasons if not reason or "GRPC" in reason]


def test_the_server_can_announce_another_address() -> None:
    server = ChannelServer("127.0.0.1:0", "server.example.org:9000")
    assert server.address == "server.example.org:9000"
    server.close()


def test_a_missing_server_is_an_error_at_once() -> None:
    server = ChannelServer("127.0.0.1:0")
    server.close()
    with pytest.raises(
        EngineError, match=f"channel at {server.address}: StatusCode.UNAVAILABLE"
    ):
        ChannelReducer(server.address, "token", b"", 3600).begin()


@pytest.mark.parametrize("timeout", [1, 120])
def test_a_call_lasts_longer_than_the_server_waits(monkeypatch, timeout: int) -> None:
    """Otherwise the first member would be lost together with the late member."""
    channel = mock.MagicMock()
    monkeypatch.setattr(grpc, "insecure_channel", lambda *_: channel)
    call = channel.unary_unary.return_value
    text = b'{"status": "ok", "attempt": 0, "union": 2}'
    call.return_value = struct.pack(">I", len(text)) + text
    ChannelReducer("localhost:1", "token", b"", timeout).begin()
    assert call.call_args.kwargs["timeout"] >= BODY_SECONDS + timeout
