"""The server serves honest clients during attacks on the gRPC channel.

The attacker keeps as many calls open as possible.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc
import pytest
import torch

from fedbn_flwr.transport import Barrier, channel_server
from fedbn_flwr.transport.channel_frame import Call, pack

CALL = "/fedbn.Channel/Call"
MANY = 300  # more calls than a pool of threads that wait for bodies


@pytest.fixture
def attack() -> Iterator[Callable[..., list]]:
    """Provide ``attack(address, token, body, count)`` to start unfinished calls.

    If the body is None, the calls never send a body.
    """
    over = threading.Event()
    channels = []

    def bodies() -> Iterator[bytes]:
        over.wait()
        yield from ()

    def start(address: str, token: str, body: bytes | None, count: int = MANY) -> list:
        channel = grpc.insecure_channel(
            address, [("grpc.use_local_subchannel_pool", 1)]
        )
        channels.append(channel)
        metadata = (("token", token),)
        if body is None:
            call = channel.stream_unary(CALL)
            return [call.future(bodies(), metadata=metadata) for _ in range(count)]
        call = channel.unary_unary(CALL)
        return [call.future(body, metadata=metadata) for _ in range(count)]

    yield start
    over.set()
    for channel in channels:
        channel.close()


def exchange(value: float) -> bytes:
    return pack(Call(op="reduce", tag="gradients/0"), torch.tensor([value]))


def test_a_stranger_that_holds_calls_open_stalls_nobody(
    server, members, honest, attack
) -> None:
    barrier = Barrier(members(1, 3), timeout=10)
    tokens = server.admit(barrier)
    calls = attack(server.address, "no token", None)
    assert honest(server, tokens.values()) == [3.0, 3.0]
    assert barrier.dropped == {}
    assert {call.code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}, (
        "refused without their bodies"
    )


@pytest.mark.parametrize(
    "body", [None, exchange(1000.0)], ids=["no body", "an exchange"]
)
def test_a_member_with_many_calls_at_once_is_dropped_by_name_and_the_others_are_served(
    server, members, honest, attack, body
) -> None:
    barrier = Barrier(members(1, 3, 1), timeout=10)
    tokens = server.admit(barrier)
    calls = attack(server.address, tokens[102], body)
    # without the caller's statistics
    assert honest(server, [tokens[100], tokens[101]]) == [3.0, 3.0]
    assert list(barrier.dropped) == [102]
    assert "while another of its calls was open" in barrier.dropped[102]
    ended = threading.Semaphore(0)
    for call in calls:
        call.add_done_callback(lambda _: ended.release())
    # one call without a body stays open until its time is over
    for _ in range(MANY - 1):
        assert ended.acquire(timeout=20)
    done = [call for call in calls if call.done()]
    assert all(call.exception() or b'"dropped"' in call.result() for call in done)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (None, "sent no body of a call within 0.2 s"),
        (pack(Call(op="begin"), torch.ones(1)), "with no other call"),
    ],
    ids=["no body", "a tensor too many"],
)
def test_a_body_that_never_comes_or_cannot_be_read_drops_the_member(
    server, members, honest, attack, monkeypatch, body, why
) -> None:
    monkeypatch.setattr(channel_server, "BODY_SECONDS", 0.2)
    barrier = Barrier(members(1, 3, 1), timeout=60)
    tokens = server.admit(barrier)
    # Without a reference, gRPC ends the call.
    held = attack(server.address, tokens[102], body, 1)
    assert honest(server, [tokens[100], tokens[101]]) == [3.0, 3.0]
    assert barrier.dropped.keys() == {102}
    assert barrier.dropped[102].endswith(why)
    assert (held[0].code() == grpc.StatusCode.INVALID_ARGUMENT) == bool(body)


def test_any_number_of_clients_waits_for_one_another(server, members) -> None:
    """A waiting client occupies no thread of the server."""
    tokens = server.admit(Barrier(members(*[1] * MANY), timeout=60))
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(CALL)
        sent = [
            call.future(exchange(2.0 * i), metadata=(("token", token),))
            for i, token in enumerate(tokens.values())
        ]
        answers = {waiting.result(timeout=20)[-4:] for waiting in sent}
    assert answers == {torch.tensor(MANY - 1.0).numpy().tobytes()}
