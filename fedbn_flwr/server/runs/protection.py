"""The interface for privacy between the clients' replies and the methods.

A protection replaces the replies of a round by one average with noise. The class here
does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedbn_flwr.server.methods.method import Facts, Reply
from fedbn_flwr.server.methods.together import Methods
from fedbn_flwr.server.runs.round_outcome import RoundOutcome


class Protection:
    """No protection, and the base class of all protections.

    Attributes:
        publishes_metrics: whether the clients' metrics are added to the run's reports.
        always_releases: whether a round has a result even if too few replies, or none,
            are usable. Clients then never send a hash of their local state, because a
            hash would confirm a guess of the client's data.
    """

    publishes_metrics = True
    always_releases = False

    def begin(self, methods: Methods) -> None:
        """Prepare a new run.

        Raises:
            ConfigError: the methods, or one of their settings, do not fit.
        """

    def config(self) -> Mapping[str, Any]:
        """Return further config entries of a training message."""
        return {}

    def check(self, facts: Facts, reply: Reply) -> None:
        """Raise ReplyError for a reply that breaks a rule of the protection."""

    def pool(
        self,
        facts: Facts,
        report: RoundOutcome,
        replies: Sequence[Reply],
    ) -> Sequence[Reply]:
        """Return the replies that the method combines.

        If there are none, the round has no result, and the previous model is kept.

        Args:
            facts: the round.
            report: its report.
            replies: the usable replies, in the order of partition ids.
        """
        return replies

    def outcome(self) -> dict[str, Any]:
        """Return the protection's entries of a run's summary, by key."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of ``state_dict``."""
