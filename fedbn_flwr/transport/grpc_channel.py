"""The gRPC channel: clients in other processes or on other machines reduce through one port of the server.

Clients only open outgoing connections. Every call has a token that belongs to one node for one round. A call without a
valid token is refused before it reaches a barrier. TLS is required except on the loopback interface. ``connect`` is a
client's choice between the channel and a barrier in its process.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.errors import ConfigError, EngineError, FedBNError
from fedbn_flwr.messages.protocol import (
    BARRIER,
    CHANNEL_ADDRESS,
    CHANNEL_CA,
    CHANNEL_TIMEOUT,
    CHANNEL_TOKEN,
    MASK_PRESENT,
)
from fedbn_flwr.training.turns import interrupted
from fedbn_flwr.transport.barrier import Barrier
from fedbn_flwr.transport.through_user_code import Dropped, Reducer, RetryStep, local_reducer, wrapped

__all__ = ["ChannelReducer", "ChannelServer", "connect", "is_loopback"]

_SERVICE, _METHOD = "fedbn.Channel", "Call"
_MAX_BYTES = 4 * 2**20  # far above three rows of any layer's channels
_MAX_CALLS = 512  # calls that wait at the same time, one per client of a round
_OPTIONS = [("grpc.max_receive_message_length", _MAX_BYTES), ("grpc.max_send_message_length", _MAX_BYTES)]
_DTYPES = ("float32", "float64", "int64")  # the last one: masked


class ChannelServer:
    """The server's end: a gRPC port that finds the barrier of a round by the caller's token.

    Args:
        bind: ``host:port``; port 0 takes a free port.
        address: the address that clients connect to; "" = ``bind`` with the port in use.
        tls_dir: folder with ``ca.crt``, ``server.crt`` and ``server.key``; "" = plaintext, on loopback only.

    Raises:
        ConfigError: plaintext on another interface than loopback, missing certificates, or an address that cannot be
            bound.
    """

    def __init__(self, bind: str, address: str = "", tls_dir: str = "") -> None:
        if not tls_dir and not is_loopback(bind):
            raise ConfigError(
                f"fedtan-bind={bind!r} is reachable from other machines, and fedtan-tls-dir is not set: plaintext is "
                "allowed on loopback only. Set fedtan-tls-dir to a folder with ca.crt, server.crt and server.key."
            )
        self._reducers: dict[str, tuple[Barrier, int]] = {}
        # A port that another process uses is an error; it is not shared.
        options = [*_OPTIONS, ("grpc.so_reuseport", 0)]
        self._server = grpc.server(ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="channel"), options=options)
        handler = grpc.unary_unary_rpc_method_handler(self._call)
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler})])
        self.certificate = b""
        try:
            if tls_dir:
                folder = Path(tls_dir)
                self.certificate = (folder / "ca.crt").read_bytes()
                pair = ((folder / "server.key").read_bytes(), (folder / "server.crt").read_bytes())
                port = self._server.add_secure_port(bind, grpc.ssl_server_credentials([pair]))
            else:
                port = self._server.add_insecure_port(bind)
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"fedtan-bind={bind!r}, fedtan-tls-dir={tls_dir!r}: {error}") from error
        self.address = address or f"{bind.rpartition(':')[0]}:{port}"
        self._server.start()

    def admit(self, barrier: Barrier) -> Mapping[int, str]:
        """Return a fresh token for each member of a barrier, by node id.

        Raises:
            ConfigError: more members than calls that can wait at the same time.
        """
        if len(barrier.members) > _MAX_CALLS:
            raise ConfigError(
                f"{len(barrier.members)} clients would wait for one another in the channel, where {_MAX_CALLS} can. "
                "Lower fraction-train, or set fedtan-transport='messages'."
            )
        tokens = {node_id: secrets.token_urlsafe(32) for node_id in barrier.members}
        self._reducers.update({token: (barrier, node_id) for node_id, token in tokens.items()})
        return tokens

    def dismiss(self, barrier: Barrier) -> None:
        """Remove the tokens of a barrier."""
        self._reducers = {token: reducer for token, reducer in self._reducers.items() if reducer[0] is not barrier}

    def close(self) -> None:
        """Close the port."""
        self._server.stop(grace=None).wait()

    def _call(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        token = dict(context.invocation_metadata()).get("token", "")
        barrier, node_id = self._reducers.get(str(token), (None, 0))
        if barrier is None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "unknown or expired token")
            raise Dropped("unknown or expired token")
        try:
            header, tensor = _unpack(request)
            operation = header["op"]
            if operation not in ("begin", "reduce", "close"):
                raise ValueError(f"unknown operation {operation!r}")
            attempt, tag = int(header.get("attempt", 0)), str(header.get("tag", ""))
        except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
            barrier.leave(node_id, f"sent a call that cannot be read: {error}")
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a call that cannot be read: {error}")
        try:
            return _answer(barrier, node_id, operation, attempt, tag, tensor, context)
        except RetryStep as error:
            return _pack({"status": "retry", "message": str(error)})
        except FedBNError as error:
            return _pack({"status": "dropped", "message": str(error)})


def _answer(
    barrier: Barrier,
    node_id: int,
    operation: str,
    attempt: int,
    tag: str,
    tensor: Tensor | None,
    context: grpc.ServicerContext,
) -> bytes:
    if operation == "begin":
        attempt, union = barrier.begin(node_id)
        return _pack({"status": "ok", "attempt": attempt, "union": union})
    if operation == "close":
        barrier.close(node_id)
        return _pack({"status": "ok"})
    if tensor is None:
        raise Dropped(f"exchange '{tag}' came without a tensor")
    waiting = True

    def ended() -> None:
        if waiting:
            barrier.leave(node_id, f"lost its connection in exchange '{tag}'")

    context.add_callback(ended)  # runs at the end of every call, also after RetryStep
    try:
        answer = barrier.reduce(node_id, attempt, tag, tensor)
    finally:
        waiting = False
    return _pack({"status": "ok"}, answer)


class ChannelReducer:
    """The client's end.

    Args:
        address: ``host:port`` of the channel.
        token: this node's token for this round.
        certificate: PEM of the CA; b"" = plaintext, to loopback only.
        timeout: seconds that the server waits in an exchange; a call may take a little longer.

    Raises:
        ConfigError: plaintext to another address than loopback.
    """

    def __init__(self, address: str, token: str, certificate: bytes, timeout: float) -> None:
        if certificate:
            self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(certificate), _OPTIONS)
        elif is_loopback(address):
            self._channel = grpc.insecure_channel(address, _OPTIONS)
        else:
            raise ConfigError(
                f"the channel at {address!r} is not on loopback and has no TLS: refused. Set the run's fedtan-tls-dir "
                "to a folder on the server with ca.crt, server.crt and server.key, or use fedtan-transport=messages."
            )
        self._address, self._token, self._deadline = address, token, timeout + 30
        self._call = self._channel.unary_unary(f"/{_SERVICE}/{_METHOD}")
        self._attempt = 0

    def begin(self) -> int:
        """See ``Reducer.begin``."""
        header, _ = self._ask({"op": "begin"})
        self._attempt = int(header["attempt"])
        return int(header["union"])

    def reduce(self, tag: str, tensor: Tensor) -> Tensor:
        """See ``Reducer.reduce``."""
        _, answer = self._ask({"op": "reduce", "attempt": self._attempt, "tag": tag}, tensor.cpu())
        if answer is None:
            raise EngineError(f"the channel answered exchange '{tag}' without a tensor")
        return answer

    def close(self) -> None:
        """See ``Reducer.close``."""
        self._ask({"op": "close"})
        self._channel.close()

    def _ask(self, header: Mapping[str, Any], tensor: Tensor | None = None) -> tuple[dict[str, Any], Tensor | None]:
        # The port is open before a client has its token: if the first call cannot connect, waiting does not help.
        wait = header["op"] != "begin"
        token = (("token", self._token),)
        try:
            with interrupted():
                reply = self._call(_pack(header, tensor), metadata=token, timeout=self._deadline, wait_for_ready=wait)
        except grpc.RpcError as error:
            code = getattr(error, "code", lambda: "unknown")()
            details = getattr(error, "details", lambda: "")()
            raise EngineError(f"channel at {self._address}: {code}: {details}") from error
        answer, result = _unpack(reply)
        if answer["status"] == "retry":
            raise RetryStep(answer["message"])
        if answer["status"] == "dropped":
            raise Dropped(answer["message"])
        return answer, result


def is_loopback(address: str) -> bool:
    """Return whether ``host:port`` is on the loopback interface."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _pack(header: Mapping[str, Any], tensor: Tensor | None = None) -> bytes:
    """Return the bytes of a call: length of the header (4 bytes, big-endian), header (JSON), the tensor's bytes."""
    body = b""
    if tensor is not None:
        array = tensor.detach().cpu().contiguous().numpy()
        header = {**header, "dtype": str(array.dtype), "shape": list(array.shape)}
        body = array.tobytes()
    text = json.dumps(header).encode()
    return struct.pack(">I", len(text)) + text + body


def _unpack(data: bytes) -> tuple[dict[str, Any], Tensor | None]:
    """Return header and tensor of a call.

    Raises:
        ValueError, KeyError, TypeError, struct.error, RecursionError: the bytes are not a call.
    """
    (length,) = struct.unpack_from(">I", data)
    header = json.loads(data[4 : 4 + length])
    if not isinstance(header, dict):
        raise ValueError("the header is no mapping")
    if "dtype" not in header:
        return header, None
    if header["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {header['dtype']!r} is none of {', '.join(_DTYPES)}")
    array = np.frombuffer(data, dtype=header["dtype"], offset=4 + length)
    return header, torch.from_numpy(array.reshape(header["shape"]).copy())


def connect(config: Mapping[str, Any]) -> Reducer:
    """Return this client's reducer: over the channel if the config has its address, else at a barrier in this process.

    Args:
        config: the config of the training message.

    Raises:
        EngineError: there is no such barrier, or masks are required and no mod makes them.
    """
    if CHANNEL_ADDRESS in config:
        address, token = str(config[CHANNEL_ADDRESS]), str(config[CHANNEL_TOKEN])
        reducer: Reducer = ChannelReducer(
            address, token, bytes(config.get(CHANNEL_CA, b"")), float(config[CHANNEL_TIMEOUT])
        )
    else:
        reducer = local_reducer(str(config[BARRIER]))
    return wrapped(reducer, required=MASK_PRESENT in config)
