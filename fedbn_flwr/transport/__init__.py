"""How the exchanges of a synchronised step travel between the clients of a round.

A client calls ``reduce(tag, tensor)`` of a ``Reducer``. The answer comes from a barrier
in this process, over gRPC, or from a log of earlier answers.
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
