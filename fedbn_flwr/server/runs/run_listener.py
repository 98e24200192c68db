"""The events that a run reports to a listener of ``Strategy.start``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flwr.app import ArrayRecord, MetricRecord

from fedbn_flwr.batchnorm.array_types import State
from fedbn_flwr.messages.protocol import Continuity
from fedbn_flwr.server.methods.method import Reply


class RunListener:
    """The listener of a run, for ``strategy.start(..., recording=...)``.

    A subclass overrides the methods that it needs.

    Attributes:
        continuity: the run, in the form that is sent to clients with a state folder;
            read before each message. None uses the continuity of the strategy.
        finished: whether the run ends before its last round; read before each round,
            including the first round of a resumed run.
        whole_replies: whether ``replies`` reads more of a reply than its metrics and
            its running statistics. If not, the run needs less memory.
    """

    continuity: Continuity | None = None
    finished: bool = False
    whole_replies: bool = True

    def begin(self, after: int) -> None:
        """Receive the round after which the run begins, or 0 if it is not resumed."""

    def replies(
        self, server_round: int, replies: Sequence[Reply], before: State, after: State
    ) -> None:
        """Receive a round's used replies, and the global state before and after it."""

    def end_round(
        self,
        server_round: int,
        arrays: ArrayRecord,
        metrics: Mapping[str, MetricRecord],
    ) -> None:
        """Receive the result of a round, as a strategy's ``on_round_end`` does."""
