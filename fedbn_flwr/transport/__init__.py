"""How the exchanges of a synchronised step travel between the clients of a round.

A client takes a ``Reducer`` and calls ``reduce(tag, tensor)``. The answer comes from a barrier in this process, over
gRPC, or from a record of earlier answers.
"""

from __future__ import annotations

from fedbn_flwr.transport.barrier import Barrier, BarrierGrid, Member, local_reducer, use_reducers
from fedbn_flwr.transport.reducer import Dropped, Reducer, RetryStep
from fedbn_flwr.transport.replay import Pending, Replay

__all__ = [
    "Barrier",
    "BarrierGrid",
    "Dropped",
    "Member",
    "Pending",
    "Reducer",
    "Replay",
    "RetryStep",
    "local_reducer",
    "use_reducers",
]
