"""The traffic of a round, measured from the messages sent and received."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Traffic"]


@dataclass
class Traffic:
    """Bytes of the arrays in the messages, without headers; counts are listed apart, as
    in the papers.

    Counts are integer entries (int64 counters), and the examples per element in
    exchanges (``batchnorm.sync``).

    Attributes:
        exchanges: round trips between the server and its clients.
        down: bytes of floats that the server sent; one broadcast of the same arrays
            counts once, as in the papers.
        up: bytes of floats that all clients sent.
        counters_down: bytes of counts that the server sent; a broadcast counts once.
        counters_up: bytes of counts that all clients sent.
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
        return Traffic(
            *(getattr(self, name) + times * getattr(other, name) for name in names)
        )

    def count_down(self, size: tuple[int, int]) -> None:
        """Count one broadcast: (bytes of floats, bytes of others)."""
        self.down += size[0]
        self.counters_down += size[1]

    def count_up(self, size: tuple[int, int]) -> None:
        """Count one client's arrays: (bytes of floats, bytes of others)."""
        self.up += size[0]
        self.counters_up += size[1]
