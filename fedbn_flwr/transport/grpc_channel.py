"""The client's end of the gRPC channel.

Clients may be in other processes or on other machines. They only open outgoing
connections.
"""

from __future__ import annotations

import grpc
from torch import Tensor

from fedbn_flwr.errors import ConfigError, EngineError
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
from fedbn_flwr.transport.through_user_code import Dropped, RetryStep
from fedbn_flwr.transport.turns import Wait

__all__ = ["ChannelReducer"]


class ChannelReducer:
    """The client's end of the channel.

    Args:
        address: ``host:port`` of the channel.
        token: this node's token for this round.
        certificate: PEM of the CA; empty for plaintext, which is only for loopback.
        timeout: seconds that the server waits in an exchange.

    Raises:
        ConfigError: the channel would be plaintext to an address other than loopback.
    """

    def __init__(
        self, address: str, token: str, certificate: bytes, timeout: float
    ) -> None:
        if certificate:
            self._channel = grpc.secure_channel(
                address, grpc.ssl_channel_credentials(certificate), OPTIONS
            )
        elif is_loopback(address):
            self._channel = grpc.insecure_channel(address, OPTIONS)
        else:
            raise ConfigError(
                f"the channel at {address!r} is not on loopback and has no TLS, so it"
                " is refused. Set the run's fedtan-tls-dir to a folder on the server"
                " with ca.crt, server.crt and server.key, or use"
                " fedtan-transport=messages."
            )
        self._address, self._token = address, token
        # Wait longer than the server, because the server ends a late exchange.
        self._deadline = timeout + 30
        self._call = self._channel.unary_unary(f"/{SERVICE}/{METHOD}")
        self._attempt = 0

    def begin(self) -> int:
        """See ``Reducer.begin``."""
        reply, _ = self._ask(Call(op="begin"))
        self._attempt = reply.attempt
        return reply.union

    def reduce(self, tag: str, tensor: Tensor) -> Tensor:
        """See ``Reducer.reduce``.

        Raises:
            EngineError: the channel cannot be reached, or its reply has no tensor.
        """
        _, answer = self._ask(
            Call(op="reduce", attempt=self._attempt, tag=tag), tensor.cpu()
        )
        if answer is None:
            raise EngineError(f"the channel answered exchange '{tag}' without a tensor")
        return answer

    def close(self) -> None:
        """See ``Reducer.close``."""
        self._ask(Call(op="close"))
        self._channel.close()

    def _ask(
        self, call: Call, tensor: Tensor | None = None
    ) -> tuple[ReplyHeader, Tensor | None]:
        try:
            # Pass on the turn, because tensors of other clients in this process may
            # complete the exchange.
            with Wait():
                data = self._call(
                    pack(call, tensor),
                    metadata=(("token", self._token),),
                    timeout=self._deadline,
                    # The port is open before a client has its token. If the first call
                    # cannot connect, waiting does not help.
                    wait_for_ready=call.op != "begin",
                )
            reply, answer = unpack(ReplyHeader, data)
        except grpc.RpcError as error:
            code = getattr(error, "code", lambda: "unknown")()
            details = getattr(error, "details", lambda: "")()
            raise EngineError(
                f"channel at {self._address}: {code}: {details}"
            ) from error
        except ValueError as error:
            raise EngineError(
                f"channel at {self._address}: the reply cannot be read: {error}"
            ) from error
        if reply.status == "retry":
            raise RetryStep(reply.message)
        if reply.status == "dropped":
            raise Dropped(reply.message)
        return reply, answer
