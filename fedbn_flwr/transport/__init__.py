"""How the exchanges of a synchronised step travel between the clients of a round.

A client calls ``reduce(tag, tensor)`` of a ``Reducer``. The answer comes from a barrier in this process, over gRPC, or
from a log of earlier answers.
"""

from __future__ import annotations

from fedbn_flwr.transport.barrier import Barrier, BarrierGrid, Member, local_reducer, use_reducers
from fedbn_flwr.transport.reducer import Dropped, Reducer, RetryStep, Signal, wrap_reducers, wrapped
from fedbn_flwr.transport.replay import Pending, Replay, StepDone

__all__ = [
    "Barrier",
    "BarrierGrid",
    "Dropped",
    "Member",
    "Pending",
    "Reducer",
    "Replay",
    "RetryStep",
    "Signal",
    "StepDone",
    "local_reducer",
    "use_reducers",
    "wrap_reducers",
    "wrapped",
]
