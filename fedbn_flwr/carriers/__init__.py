"""Carriers: how the exchanges of a synchronised step travel between the clients of a round.

A client takes a ``Seat`` and calls ``reduce(tag, tensor)``; whether that is a barrier in this process, a gRPC call or
a recorded answer is the carrier's business. Nothing here imports flwr.
"""

from __future__ import annotations

from fedbn_flwr.carriers.meeting import Meeting, Member, seat_here, seats_of
from fedbn_flwr.carriers.replay import Pending, Replay
from fedbn_flwr.carriers.seat import Dropped, Redo, Seat

__all__ = ["Dropped", "Meeting", "Member", "Pending", "Redo", "Replay", "Seat", "seat_here", "seats_of"]
