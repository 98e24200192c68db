"""The place between the clients' replies and the method, where privacy is protected.
Here nothing is done.

A protection replaces the replies of a round by what the method may see: one average
with noise, or one masked sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.server.methods.method import Facts, Node, Reply
from fedbn_flwr.server.methods.together import Methods
from fedbn_flwr.server.runs.report import RoundReport
from fedbn_flwr.transport import Member
from fedbn_flwr.transport.step import Limits

__all__ = ["Protection"]


class Protection:
    """No protection; the base of those that protect.

    Attributes:
        publishes_metrics: whether the clients' metrics go into the reports of the run.
        always_releases: whether a round has a result also with too few usable replies,
            or none. What a client keeps leaves it in no round then: a hash of it would
            confirm a guess of the client's data.
        reads_each: whether the method can check each reply; else ``pool`` lets it check
            the result.
    """

    publishes_metrics = True
    always_releases = False
    reads_each = True

    def begin(self, methods: Methods, weighted_by_key: str) -> None:
        """Prepare a new run; ``weighted_by_key`` names the metric that weighs the
        replies.

        Raises:
            ConfigError: the method, or a setting of it, does not fit.
        """

    def admits(self, facts: Facts, asked: int) -> bool:
        """Return whether so many clients may be asked to train in this round; if not,
        the round does nothing.
        """
        return True

    def config(self) -> Mapping[str, Any]:
        """Return the further config of a training message."""
        return {}

    def protect_messages(
        self,
        facts: Facts,
        report: RoundReport,
        messages: Sequence[tuple[Node, Message]],
        grid: Grid,
        timeout: float,
    ) -> list[Message]:
        """Return the training messages to send, after messages of the protection's own;
        the report names lost nodes.

        Args:
            facts: the round.
            report: its report.
            messages: a training message for each sampled node.
            grid: the nodes.
            timeout: seconds to wait for replies.
        """
        return [message for _, message in messages]

    def limits(self, limits: Limits, members: Mapping[int, Member]) -> Limits:
        """Return when a synchronised step of these members, by node id, is given up,
        and how it is computed.
        """
        return limits

    def expected(self, facts: Facts) -> State:
        """Return arrays like those that a reply to a training message must hold."""
        return facts.shared

    def check(self, facts: Facts, reply: Reply) -> None:
        """Raise ReplyError for a reply that breaks a rule of the protection."""

    def pool(
        self,
        facts: Facts,
        report: RoundReport,
        replies: Sequence[Reply],
        check: Callable[[Reply], None],
    ) -> Sequence[Reply]:
        """Return the replies that the method combines.

        No reply means that the round ends without a result, and the previous model is
        kept.

        Args:
            facts: the round.
            report: its report.
            replies: the usable replies, in the order of partition ids.
            check: raises ReplyError for a reply that the methods cannot use; where
                ``reads_each`` is False, nobody else checks.
        """
        return replies

    def stops_after(self, server_round: int) -> bool:
        """Return whether the run ends after this round, because a further one would
        cost too much.
        """
        return False

    def outcome(self) -> dict[str, Any]:
        """Return what the summary of a run says of the protection, by key."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state to checkpoint, JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of ``state_dict``."""
