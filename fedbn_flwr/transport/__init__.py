"""How the exchanges of a synchronised step travel between the clients of a round.

A client calls ``reduce(tag, tensor)`` of a ``Reducer``. The answer comes from a barrier
in this process, over gRPC, or from a log of earlier answers. In reading order:

- ``through_user_code``: ``Reducer``, and how it gets past a user's training code.
- ``barrier``: collects a tensor from each client, and answers all; the first transport.
- ``channel_frame``: a call to a barrier on another machine, and its reply, as bytes.
- ``channel_server``: the port at which such calls come in; the second transport.
- ``grpc_channel``: the client's end of it, and a client's choice of its reducer.
- ``replay``: a step by messages, run again with the answers so far; the third one.
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
    local_reducer,
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
    "local_reducer",
    "use_reducers",
    "wrap_reducers",
    "wrapped",
]
