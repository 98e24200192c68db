"""Saving a run's checkpoints: when one is due, and what clients must know of it."""

from __future__ import annotations

import logging
from uuid import uuid4

from fedbn_flwr.errors import NotResumableError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.early_stopping import EarlyStopping
from fedbn_flwr.lab.output.checkpoint import Checkpoint, Checkpoints
from fedbn_flwr.messages.protocol import Continuity
from fedbn_flwr.messages.records import views
from fedbn_flwr.strategies import Strategy

__all__ = ["CheckpointManager"]

logger = logging.getLogger("flwr")


class CheckpointManager:
    """Saves checkpoints during a run.

    Args:
        checkpoints: the checkpoints of the run's folder.
        config: the resolved config.
        strategy: the strategy to save; it is restored from ``saved``.
        saved: the checkpoint to resume from.

    Attributes:
        checkpoints: as given.
        continuity: the run and its saved rounds, for clients with a state folder.
        resumed_after: the rounds after which the run was resumed so far.

    Raises:
        ConfigError: clients kept state in memory only, which is lost.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        config: Config,
        strategy: Strategy,
        saved: Checkpoint | None,
    ) -> None:
        self.checkpoints = checkpoints
        self._config = config
        self._strategy = strategy
        self._warned: set[str] = set()
        # the run after the last whole round
        self._whole: Checkpoint | None = None
        self._run = uuid4().hex[:16]
        self.resumed_after: list[int] = []
        if saved:
            volatile = saved.strategy["kept"]["volatile"]
            if volatile:
                raise NotResumableError(
                    f"cannot resume: client(s) {', '.join(volatile)} kept their part in"
                    " memory only, and it is lost. Give runs of this strategy a state"
                    " folder (state-dir) from the start."
                )
            after = saved.server_round
            logger.info("resumed after round %d from %s", after, checkpoints.folder)
            strategy.load_state_dict(saved.strategy, after)
            checkpoints.set_aside_after(after)
            self._run = saved.run
            self.resumed_after = [*saved.resumed_after, after]
        self.continuity = self._continuity()

    def after_round(
        self, server_round: int, stopping: EarlyStopping | None = None
    ) -> None:
        """Save a checkpoint if one is due; warn of clients that lose what they keep."""
        if self._config.series:
            what = f"series={self._config.series} has no effect for them"
            self._warn_of_volatile(what)
        if not self._config.checkpoint_every:
            return
        self._whole = self._checkpoint(server_round)
        last = server_round == self._config.num_server_rounds
        last = last or self._strategy.stops_after(server_round)
        if self.checkpoints.due(server_round, last, stopping):
            self._save(self._whole, stopping)

    def on_signal(self, stopping: EarlyStopping | None = None) -> None:
        """Save the last whole round of a run that a signal ends in mid-round."""
        if self._whole and self._whole.server_round not in self.checkpoints.rounds:
            self._save(self._whole, stopping)

    def after_run(self, stopping: EarlyStopping | None = None) -> None:
        """Save the last round's checkpoint, unless ``after_round`` has done so."""
        # It could not know yet that the run would be stopped.
        if not self._strategy.reports:
            return
        last = self._strategy.reports[-1].server_round
        if last in self.checkpoints.rounds:
            return
        if self.checkpoints.due(last, True, stopping):
            self._save(self._checkpoint(last), stopping)

    def _checkpoint(self, server_round: int) -> Checkpoint:
        """Return the run as it is."""
        # Nothing is copied: a round makes new arrays and states.
        state = views(self._strategy.run.arrays)
        strategy = self._strategy.state_dict()
        return Checkpoint(server_round, state, strategy, self._run, self.resumed_after)

    def _save(self, checkpoint: Checkpoint, stopping: EarlyStopping | None) -> None:
        self.checkpoints.save(checkpoint, stopping)
        self.continuity = self._continuity()
        self._warn_of_volatile("this run cannot be resumed")

    def _warn_of_volatile(self, what: str) -> None:
        """Warn once of ``what`` follows if clients keep their part in memory only."""
        volatile = self._strategy.run.kept.volatile
        if volatile and what not in self._warned:
            self._warned.add(what)
            logger.warning(
                "client(s) %s keep their part in memory only: %s. Set state-dir, in the"
                " run's config or in each node's.",
                ", ".join(sorted(volatile)),
                what,
            )

    def _continuity(self) -> Continuity:
        series = self._config.series or self._run
        return Continuity(series, self._run, tuple(self.checkpoints.rounds))
