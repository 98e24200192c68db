"""The server's end of the gRPC channel: one port for the clients of a round.

Every call has a token that belongs to one node for one round. A call without a valid
token is refused by its metadata, before anything of its body is read. Calls wait in one
event loop and hold no thread, so nobody can use up the places of others. A member has
one call at a time; a second one, and each call that cannot be read, drops the member at
once. TLS is required except on the loopback interface.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Coroutine, Mapping
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
    Reply,
    is_loopback,
    pack,
    unpack,
)
from fedbn_flwr.transport.through_user_code import RetryStep

__all__ = ["ChannelServer"]

logger = logging.getLogger("flwr")

BODY_SECONDS = 30.0  # from the start of a call until its body is there
_OPTIONS = [
    *OPTIONS,
    # a port that another process uses is an error; it is not shared
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 60_000),  # a client connects again by itself
]
_MAX_HOSTS = 1000  # hosts of strangers that are counted apart
_T = TypeVar("_T")


class ChannelServer:
    """A gRPC port that finds the barrier of a round by the caller's token.

    Args:
        bind: ``host:port``; port 0 takes a free port.
        address: the address that clients connect to; "" = ``bind`` with its port.
        tls_dir: folder with ``ca.crt``, ``server.crt`` and ``server.key``; "" =
            plaintext, on loopback only.

    Attributes:
        address: the address that clients connect to.
        certificate: PEM of the CA; b"" = plaintext.

    Raises:
        ConfigError: plaintext on another interface than loopback, missing certificates,
            or an address that cannot be bound.
    """

    def __init__(self, bind: str, address: str = "", tls_dir: str = "") -> None:
        if not tls_dir and not is_loopback(bind):
            raise ConfigError(
                f"fedtan-bind={bind!r} is reachable from other machines, and"
                " fedtan-tls-dir is not set: plaintext is allowed on loopback only."
                " Set fedtan-tls-dir to a folder with ca.crt, server.crt and"
                " server.key."
            )
        # by token. It is replaced, never changed: calls in the loop's thread read it.
        self._reducers: dict[str, tuple[Barrier, int]] = {}
        self._calling: set[str] = set()  # tokens that have a call open
        self._strangers: Counter[str] = Counter()
        self.certificate = b""
        # gRPC's asyncio server lives in one loop. The ServerApp's thread has none.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="channel", daemon=True
        )
        self._thread.start()
        try:
            port = self._run(self._listen(bind, tls_dir))
        except (OSError, RuntimeError) as error:
            self._end_loop()
            raise ConfigError(
                f"fedtan-bind={bind!r}, fedtan-tls-dir={tls_dir!r}: {error}"
            ) from error
        self.address = address or f"{bind.rpartition(':')[0]}:{port}"

    async def _listen(self, bind: str, tls_dir: str) -> int:
        """Open the port and return its number."""
        self._server = grpc.aio.server(options=_OPTIONS)
        # The handler reads the body itself, after the token: with a unary handler gRPC
        # would read it before.
        handler = grpc.stream_unary_rpc_method_handler(self._call)
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})]
        )
        if tls_dir:
            folder = Path(tls_dir)
            self.certificate = (folder / "ca.crt").read_bytes()
            key = (folder / "server.key").read_bytes()
            own = (folder / "server.crt").read_bytes()
            credentials = grpc.ssl_server_credentials([(key, own)])
            port = self._server.add_secure_port(bind, credentials)
        else:
            port = self._server.add_insecure_port(bind)
        await self._server.start()
        return int(port)

    def admit(self, barrier: Barrier) -> Mapping[int, str]:
        """Return a fresh token for each member of a barrier, by node id."""
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
        """Answer a call, or refuse it."""
        # Whose call it is, by metadata alone: a stranger's body is never read.
        token = str(dict(context.invocation_metadata() or ()).get("token", ""))
        barrier, node_id = self._reducers.get(token, (None, 0))
        if barrier is None:
            self._count(context.peer())
            await _refuse(
                context, grpc.StatusCode.UNAUTHENTICATED, "unknown or expired token"
            )

        # A member waits for each answer, so a second call is a fault or a stolen token.
        if token in self._calling:
            barrier.leave(node_id, "sent a call while another of its calls was open")
            await _refuse(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "another call with this token is open",
            )

        # Whatever ends the call early drops the member, or the others would wait.
        self._calling.add(token)
        try:
            data = await asyncio.wait_for(context.read(), BODY_SECONDS)
            # gRPC has a constant of its own for the end of a call without a body
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

    def _count(self, peer: str) -> None:
        """Count a call without a valid token; log each host's 1st, 10th, 100th, ..."""
        host = peer.rpartition(":")[0]
        # A stranger with many addresses shall not fill the memory.
        if host not in self._strangers and len(self._strangers) >= _MAX_HOSTS:
            host = "other hosts"
        self._strangers[host] += 1
        count = self._strangers[host]
        if str(count).rstrip("0") == "1":  # a power of ten
            logger.warning(
                "the channel has refused %d call(s) without a valid token from %s",
                count,
                host,
            )


async def _refuse(
    context: grpc.aio.ServicerContext[bytes, bytes], code: grpc.StatusCode, text: str
) -> NoReturn:
    await context.abort(code, text)
    raise EngineError(text)  # not reached: gRPC has raised


async def answer(barrier: Barrier, node_id: int, data: bytes) -> bytes:
    """Return the reply to a member's call.

    Raises:
        ValueError: the call cannot be read; the member is dropped.
    """
    try:
        call, tensor = unpack(Call, data)
        if (tensor is not None) != (call.op == "reduce"):
            raise ValueError("a tensor comes with 'reduce', and with nothing else")
    except ValueError as error:
        barrier.leave(node_id, f"sent a call that cannot be read: {error}")
        raise ValueError(f"a call that cannot be read: {error}") from error
    try:
        if tensor is not None:
            reduced = await _reduce(barrier, node_id, call, tensor)
            return pack(Reply(status="ok"), reduced)
        if call.op == "begin":
            attempt, union = barrier.begin(node_id)
            return pack(Reply(status="ok", attempt=attempt, union=union))
        barrier.close(node_id)
        return pack(Reply(status="ok"))
    except RetryStep as error:
        return pack(Reply(status="retry", message=str(error)))
    except FedBNError as error:
        return pack(Reply(status="dropped", message=str(error)))


async def _reduce(barrier: Barrier, node_id: int, call: Call, tensor: Tensor) -> Tensor:
    """Return the barrier's answer. Meanwhile members that are late are dropped.

    Raises:
        RetryStep, Dropped: see ``Reducer.reduce``.
    """
    loop = asyncio.get_running_loop()
    over: asyncio.Future[Outcome] = loop.create_future()

    def end(outcome: Outcome) -> None:
        if not over.done():
            over.set_result(outcome)

    # called in another thread, maybe after the call has lost its connection
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
