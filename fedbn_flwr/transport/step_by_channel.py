"""The transport "channel", with a barrier in the server's process.

The clients reach the barrier through a gRPC port. ``channel_server`` is the port,
``grpc_channel`` is the client's end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedbn_flwr.errors import EngineError
from fedbn_flwr.messages.protocol import (
    CHANNEL_ADDRESS,
    CHANNEL_CA,
    CHANNEL_TIMEOUT,
    CHANNEL_TOKEN,
    without_empty,
)
from fedbn_flwr.transport.barrier import Barrier, Member
from fedbn_flwr.transport.polling_grid import in_simulation
from fedbn_flwr.transport.step_by_barrier import play_step, release
from fedbn_flwr.transport.step_transport import (
    Limits,
    LinkSettings,
    StepResult,
    Transport,
    with_config,
)
from fedbn_flwr.transport.through_user_code import Reducer

# Both ends of a channel are imported only when they are opened, because gRPC takes a
# while to import and most runs open no channel.
if TYPE_CHECKING:
    from fedbn_flwr.transport.channel_server import ChannelServer


class ByChannel(Transport):
    """The clients exchange through the server's port, open during the run."""

    def __init__(self, settings: LinkSettings) -> None:
        super().__init__(settings)
        self._server: ChannelServer | None = None

    def step(
        self,
        grid: Grid,
        messages: Sequence[Message],
        members: Mapping[int, Member],
        limits: Limits,
    ) -> StepResult:
        """Send one training message with a token to each client.

        Raises:
            EngineError: Flower's simulation does not run all clients at the same time.
        """
        channel = self._opened()
        barrier = Barrier(members, limits.exchange_timeout, limits.min_members)
        tokens = channel.admit(barrier)
        where: dict[str, Any] = {
            CHANNEL_ADDRESS: channel.address,
            CHANNEL_CA: channel.certificate,
        }
        config = without_empty(where) | {CHANNEL_TIMEOUT: limits.exchange_timeout}
        own = []
        for message in messages:
            token = tokens[message.metadata.dst_node_id]
            own.append(with_config(message, {**config, CHANNEL_TOKEN: token}))
        try:
            result = play_step(grid, own, barrier, limits)
            # A simulation with too few actors would lose clients in every round.
            if in_simulation(grid) and barrier.never_began:
                raise EngineError(
                    f"{len(barrier.never_began)} of {len(members)} clients"
                    f" {barrier.never_began[0]}"
                )
            return result
        finally:
            release(barrier)
            channel.dismiss(barrier)

    def close(self) -> None:
        """Close the port, so that its address is free again."""
        if self._server is not None:
            self._server.close()
            self._server = None

    @staticmethod
    def reducer(config: Mapping[str, Any]) -> Reducer | None:
        """Return the client's end of the channel that the config names."""
        if CHANNEL_ADDRESS not in config:
            return None
        from fedbn_flwr.transport.grpc_channel import ChannelReducer

        return ChannelReducer(
            str(config[CHANNEL_ADDRESS]),
            str(config[CHANNEL_TOKEN]),
            bytes(config.get(CHANNEL_CA, b"")),
            float(config[CHANNEL_TIMEOUT]),
        )

    def _opened(self) -> ChannelServer:
        if self._server is None:
            from fedbn_flwr.transport.channel_server import ChannelServer

            own = self._settings
            self._server = ChannelServer(own.bind, own.address, own.tls_dir)
        return self._server
