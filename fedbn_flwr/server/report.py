"""What a strategy notes down of each round, measured from the messages it built and received."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

__all__ = ["RoundReport", "Traffic"]


@dataclass
class Traffic:
    """Bytes of the arrays in the messages; floats and others (int64 counters) apart, headers not counted.

    Attributes:
        exchanges: round trips between the server and its clients.
        down: bytes of floats the server sent; one broadcast of the same arrays counts once, as in the papers.
        up: bytes of floats all clients sent.
        counters_down: bytes of integer entries the server sent, counted likewise.
        counters_up: bytes of integer entries all clients sent.
    """

    exchanges: int = 0
    down: int = 0
    up: int = 0
    counters_down: int = 0
    counters_up: int = 0

    @property
    def megabytes(self) -> float:
        """Floats down and up in the papers' MB, 2^20 bytes."""
        return (self.down + self.up) / 2**20

    def plus(self, other: Traffic, times: int = 1) -> Traffic:
        """Return this traffic and ``times`` the other's."""
        names = [field.name for field in fields(self)]
        return Traffic(*(getattr(self, name) + times * getattr(other, name) for name in names))

    def count_down(self, size: tuple[int, int]) -> None:
        """Count one broadcast: (bytes of floats, bytes of others)."""
        self.down += size[0]
        self.counters_down += size[1]

    def count_up(self, size: tuple[int, int]) -> None:
        """Count one client's arrays."""
        self.up += size[0]
        self.counters_up += size[1]


@dataclass
class RoundReport:
    """One round as the server saw it.

    Attributes:
        server_round: counted from 1.
        phase: the method's own name for this stretch ("train", "frozen", ...).
        train: traffic of the training messages.
        evaluate: traffic of the evaluation messages.
        participants: partition ids whose replies were used, in order.
        rejected: node id to why its reply was refused.
        kept_previous: too few usable replies, so the global model did not change.
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
    kept_previous: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    clients: dict[str, dict[str, float]] = field(default_factory=dict)
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)

    def reject(self, node_id: int, reason: str) -> None:
        """Note why a node's reply was refused, behind what was noted of it in this round before."""
        before = self.rejected.get(node_id)
        self.rejected[node_id] = reason if before is None else f"{before}; {reason}"
