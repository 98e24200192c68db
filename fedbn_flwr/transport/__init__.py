"""How the exchanges of a synchronised step travel between the clients of a round.

``transports`` has the mapping ``TRANSPORTS``: a new transport is a file here and a line
there. A client calls ``reduce(tag, tensor)`` of a ``Reducer``. The answer comes from a
barrier in this process, over gRPC, or from a log of earlier answers. In reading order:

- ``through_user_code``: ``Reducer``, and how it gets past a user's training code.
- ``transports``: the transports by name, and a client's choice of its reducer.
- ``step_transport``: what they share: ``Transport``, limits, a step's result.
- ``barrier``: collects a tensor from each client, and answers all.
- ``step_by_barrier``: a step whose clients meet there, as in one process.
- ``step_by_channel``: "channel", a step whose clients reach the barrier by gRPC;
  ``channel_frame``: a call and its reply as bytes; ``channel_server``: the port;
  ``grpc_channel``: the client's end.
- ``step_by_messages``: "messages", a step by Flower's messages; ``replay``: the
  client's step, run again with the answers so far.
- ``polling_grid``: messages through Flower's Grid without its pauses.
"""

from __future__ import annotations

from fedbn_flwr.transport.barrier import Barrier, BarrierGrid, Member
from fedbn_flwr.transport.replay import Replay
from fedbn_flwr.transport.through_user_code import (
    Dropped,
    NextExchange,
    Reducer,
    RetryStep,
    StopStep,
    in_process_reducer,
    use_reducers,
    wrap_reducers,
    wrapped,
)

__all__ = [
    "Barrier",
    "BarrierGrid",
    "Dropped",
    "Member",
    "NextExchange",
    "Reducer",
    "Replay",
    "RetryStep",
    "StopStep",
    "in_process_reducer",
    "use_reducers",
    "wrap_reducers",
    "wrapped",
]
