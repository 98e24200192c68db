"""The report and the traffic of a round, measured from the messages sent and received."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from fedbn_flwr.errors import split_code

__all__ = ["RoundReport", "Traffic"]


@dataclass
class Traffic:
    """Bytes of the arrays in the messages, without headers; integer entries (int64 counters) are counted separately.

    Attributes:
        exchanges: round trips between the server and its clients.
        down: bytes of floats that the server sent; one broadcast of the same arrays counts once, as in the papers.
        up: bytes of floats that all clients sent.
        counters_down: bytes of integer entries that the server sent; a broadcast counts once.
        counters_up: bytes of integer entries that all clients sent.
    """

    exchanges: int = 0
    down: int = 0
    up: int = 0
    counters_down: int = 0
    counters_up: int = 0

    @property
    def megabytes(self) -> float:
        """Floats down and up in MB of 2^20 bytes, as in the papers."""
        return (self.down + self.up) / 2**20

    def plus(self, other: Traffic, times: int = 1) -> Traffic:
        """Return the sum of this traffic and ``times`` the other."""
        names = [field.name for field in fields(self)]
        return Traffic(*(getattr(self, name) + times * getattr(other, name) for name in names))

    def count_down(self, size: tuple[int, int]) -> None:
        """Count one broadcast: (bytes of floats, bytes of others)."""
        self.down += size[0]
        self.counters_down += size[1]

    def count_up(self, size: tuple[int, int]) -> None:
        """Count one client's arrays: (bytes of floats, bytes of others)."""
        self.up += size[0]
        self.counters_up += size[1]


@dataclass
class RoundReport:
    """The server's report of one round.

    Attributes:
        server_round: counted from 1.
        phase: the method's phase ("train", "frozen", ...).
        train: traffic of the training messages.
        evaluate: traffic of the evaluation messages.
        participants: partition ids of the replies that were used, in order.
        rejected: node id to the reason why its reply was refused.
        codes: node id to the codes of these reasons, where they have any.
        asked: number of clients that training messages were sent to.
        replied: number of their replies, also of those that were refused.
        kept_previous: whether the global model did not change, for too few usable replies.
        diverged: the losses that are not finite, in words; empty if all are finite.
        diverged_at: the round in which this divergence began.
        privacy: what the protection did in this round, and the privacy spent so far, by key.
        metrics: averaged training metrics.
        clients: training metrics by partition id.
        evaluations: evaluation metrics by partition id.
    """

    server_round: int
    phase: str
    train: Traffic = field(default_factory=Traffic)
    evaluate: Traffic = field(default_factory=Traffic)
    participants: list[int | None] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)
    codes: dict[int, set[str]] = field(default_factory=dict)
    asked: int = 0
    replied: int = 0
    kept_previous: bool = False
    diverged: list[str] = field(default_factory=list)
    diverged_at: int | None = None
    privacy: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    clients: dict[str, dict[str, float]] = field(default_factory=dict)
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)

    def reject(self, node_id: int, reason: str) -> None:
        """Add the reason why a node's reply was refused to earlier reasons of this round; it may have a code."""
        code, text = split_code(reason)
        if code:
            self.codes.setdefault(node_id, set()).add(code)
        before = self.rejected.get(node_id)
        self.rejected[node_id] = text if before is None else f"{before}; {text}"
