"""Carriers: how the exchanges of a synchronised step travel between the clients of a round.

A client takes a ``Reducer`` and calls ``reduce(tag, tensor)``; whether that is a barrier in this process, a gRPC call or
a recorded answer is the carrier's business. Nothing here imports flwr.
"""

from __future__ import annotations

from fedbn_flwr.transport.barrier import Barrier, Member, reducer_here, reducers_of
from fedbn_flwr.transport.replay import Pending, Replay
from fedbn_flwr.transport.reducer import Dropped, RetryStep, Reducer

__all__ = ["Dropped", "Barrier", "Member", "Pending", "RetryStep", "Replay", "Reducer", "reducer_here", "reducers_of"]
