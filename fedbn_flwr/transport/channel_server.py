"""The server's end of the gRPC channel, with one port for the clients of a round.

Every call has a token for one node and one round. A call without a valid token is
refused by its metadata, before any byte of its body is read. Waiting calls share one
event loop and need no threads, so no caller can occupy all threads. A member may
have one call at a time. A second call, or an unreadable call, drops the member
immediately. TLS is required except on the loopback interface.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc
from torch import Tensor

from fedbn_flwr.errors import ConfigError, EngineError, FedBNError
from fedbn_flwr.transport.barrier import LOOK, Barrier, Outcome
from fedbn_flwr.transport.channel_frame import (
    METHOD,
    OPTIONS,
    SERVICE,
    Call,
    ReplyHeader,
    is_loopback,
    pack,
    unpack,
)
from fedbn_flwr.transport.through_user_code import RetryStep

__all__ = ["ChannelServer"]

logger = logging.getLogger("flwr")

# At most this many seconds pass from the start of a call until its body has arrived.
BODY_SECONDS = 30.0
_OPTIONS = [
    *OPTIONS,
    # Do not share a port that another process uses: raise an error.
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 60_000),  # clients reconnect automatically
]
_T = TypeVar("_T")


class ChannelServer:
    """A gRPC port that finds the barrier of a round by the caller's token.

    Args:
        bind: ``host:port``. Port 0 takes a free port.
        address: the address for clients. If empty, it is ``bind`` with the actual port.
        tls_dir: folder with ``ca.crt``, ``server.crt`` and ``server.key``. If empty,
            the port is plaintext and only allowed on loopback.

    Attributes:
        address: the address for clients.
        certificate: PEM of the CA; empty for plaintext.

    Raises:
        ConfigError: the port would be plaintext on an interface other than loopback,
            certificates are missing, or the address cannot be bound.
    """

    def __init__(self, bind: str, address: str = "", tls_dir: str = "") -> None:
        if not tls_dir and not is_loopback(bind):
            raise ConfigError(
                f"fedtan-bind={bind!r} is reachable from other machines, but"
                " fedtan-tls-dir is not set. Plaintext is allowed only on loopback."
                " Set fedtan-tls-dir to a folder with ca.crt, server.crt and"
                " server.key."
            )
        # Barrier and node by token. This dict is replaced and never changed, because
        # the thread of the loop reads it.
        self._reducers: dict[str, tuple[Barrier, int]] = {}
        self._calling: set[str] = set()  # tokens with an open call
        self.certificate = b""
        # gRPC's asyncio server needs a loop. The ServerApp's thread has none, so use a
        # thread of its own.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="channel", daemon=True
        )
        self._thread.start()
        try:
            port = self._run(self._listen(bind, tls_dir))
        except (OSError, ValueError) as error:
            self._end_loop()
            raise ConfigError(
                f"fedtan-bind={bind!r}, fedtan-tls-dir={tls_dir!r}: {error}. Each run"
                " of FedTAN needs a port of its own; port 0 selects a free port."
            ) from error
        self.address = address or f"{bind.rpartition(':')[0]}:{port}"

    async def _listen(self, bind: str, tls_dir: str) -> int:
        """Open the port and return its number."""
        self._server = grpc.aio.server(options=_OPTIONS)
        # Use a stream handler, because it reads the body itself, after checking the
        # token. With a unary handler, gRPC would read the body first.
        handler = grpc.stream_unary_rpc_method_handler(self._call)
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})]
        )
        open_port = self._server.add_insecure_port
        if tls_dir:
            folder = Path(tls_dir)
            self.certificate = (folder / "ca.crt").read_bytes()
            key = (folder / "server.key").read_bytes()
            own = (folder / "server.crt").read_bytes()
            credentials = grpc.ssl_server_credentials([(key, own)])
            open_port = partial(
                self._server.add_secure_port, server_credentials=credentials
            )
        try:
            port = open_port(bind)
        except RuntimeError:
            # gRPC has one text for all reasons. Python's error names a port in use and
            # an unknown address; otherwise the certificates are the reason.
            host, _, number = bind.rpartition(":")
            host = host.strip("[]")
            opens = self._loop.create_server(asyncio.Protocol, host, int(number))
            (await opens).close()
            raise OSError("server.crt and server.key do not fit each other") from None
        await self._server.start()
        return int(port)

    def admit(self, barrier: Barrier) -> Mapping[int, str]:
        """Return a new token for each member of a barrier, by node id."""
        tokens = {node_id: secrets.token_urlsafe(32) for node_id in barrier.members}
        admitted = {token: (barrier, node_id) for node_id, token in tokens.items()}
        self._reducers = self._reducers | admitted
        return tokens

    def dismiss(self, barrier: Barrier) -> None:
        """Remove the tokens of a barrier."""
        self._reducers = {
            token: reducer
            for token, reducer in self._reducers.items()
            if reducer[0] is not barrier
        }

    def close(self) -> None:
        """Close the port."""
        self._run(self._server.stop(grace=None))
        self._end_loop()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _call(
        self, _: Any, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> bytes:
        """Answer or refuse a call."""
        # Identify the caller only by metadata, so that a stranger's body is never read.
        token = str(dict(context.invocation_metadata() or ()).get("token", ""))
        barrier, node_id = self._reducers.get(token, (None, 0))
        if barrier is None:
            await _refuse(
                context, grpc.StatusCode.UNAUTHENTICATED, "unknown or expired token"
            )

        # A member waits for each answer. A second call means a fault or a stolen token.
        if token in self._calling:
            barrier.leave(node_id, "sent a call while another of its calls was open")
            await _refuse(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "another call with this token is open",
            )

        # If anything ends the call early, drop the member, or the others would wait.
        self._calling.add(token)
        try:
            data = await asyncio.wait_for(context.read(), BODY_SECONDS)
            # At the end of a call without a body, gRPC returns its own constant.
            body = data if isinstance(data, bytes) else b""
            return await answer(barrier, node_id, body)
        except asyncio.CancelledError:
            barrier.leave(node_id, "lost its connection in a call")
            raise
        except TimeoutError:
            barrier.leave(node_id, f"sent no body of a call within {BODY_SECONDS:g} s")
            await _refuse(
                context,
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"no body within {BODY_SECONDS:g} s",
            )
        except ValueError as error:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._calling.discard(token)


async def _refuse(
    context: grpc.aio.ServicerContext[bytes, bytes], code: grpc.StatusCode, text: str
) -> NoReturn:
    await context.abort(code, text)
    raise EngineError(text)  # not reached: gRPC has raised


async def answer(barrier: Barrier, node_id: int, data: bytes) -> bytes:
    """Return the reply to a member's call.

    Raises:
        ValueError: the call cannot be read, and the member is dropped.
    """
    try:
        call, tensor = unpack(Call, data)
        if (tensor is not None) != (call.op == "reduce"):
            raise ValueError("a tensor must come with 'reduce' and with no other call")
    except ValueError as error:
        barrier.leave(node_id, f"sent a call that cannot be read: {error}")
        raise ValueError(f"a call that cannot be read: {error}") from error
    try:
        if tensor is not None:
            reduced = await _reduce(barrier, node_id, call, tensor)
            return pack(ReplyHeader(status="ok"), reduced)
        if call.op == "begin":
            attempt, union = barrier.begin(node_id)
            return pack(ReplyHeader(status="ok", attempt=attempt, union=union))
        barrier.close(node_id)
        return pack(ReplyHeader(status="ok"))
    except RetryStep as error:
        return pack(ReplyHeader(status="retry", message=str(error)))
    except FedBNError as error:
        return pack(ReplyHeader(status="dropped", message=str(error)))


async def _reduce(barrier: Barrier, node_id: int, call: Call, tensor: Tensor) -> Tensor:
    """Return the barrier's answer, and drop late members while waiting.

    Raises:
        RetryStep, Dropped: see ``Reducer.reduce``.
    """
    loop = asyncio.get_running_loop()
    over: asyncio.Future[Outcome] = loop.create_future()

    def end(outcome: Outcome) -> None:
        if not over.done():
            over.set_result(outcome)

    # ``then`` is called in another thread, perhaps after the call has lost its
    # connection.
    def then(outcomes: Mapping[int, Outcome]) -> None:
        loop.call_soon_threadsafe(end, outcomes[node_id])

    barrier.send(node_id, call.attempt, call.tag, tensor, then)
    try:
        while not over.done():
            await asyncio.wait([over], timeout=LOOK)
            barrier.drop_late()
    except asyncio.CancelledError:
        barrier.leave(node_id, f"lost its connection in exchange '{call.tag}'")
        raise
    outcome = over.result()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
