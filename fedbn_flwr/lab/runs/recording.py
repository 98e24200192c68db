"""Records a federated run while its strategy does the rounds, and writes its results."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result
from torch import nn

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.errors import DivergedError, NothingTrainedError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.output.checkpoint_manager import CheckpointManager
from fedbn_flwr.lab.output.folder import DIVERGED_AT, RunFolder
from fedbn_flwr.lab.output.recorder import OnRound, Recorder
from fedbn_flwr.lab.output.statistics_log import StatisticsLog
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData
from fedbn_flwr.messages.protocol import Continuity
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.server.methods.method import Reply
from fedbn_flwr.server.runs.failures import divergence, nothing_trained
from fedbn_flwr.server.runs.recording import Recording
from fedbn_flwr.server.runs.report import RoundReport
from fedbn_flwr.strategies import Strategy

__all__ = ["RunRecord", "divergence_of", "ends_diverged"]

logger = logging.getLogger("flwr")


class RunRecord(Recording):
    """Tests the global model; writes lines, statistics, checkpoints and the results.

    It is the ``recording`` of ``Strategy.start``, and its ``test`` the ``evaluate_fn``.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        model: nn.Module,
        data: PartitionedData | None,
        strategy: Strategy,
        checkpoints: CheckpointManager,
        on_round: OnRound | None,
    ) -> None:
        self._config, self._strategy = config, strategy
        self._recorder = Recorder(folder, config, model, data, strategy, on_round)
        self._checkpoints = checkpoints
        self._statistics = None
        # What is protected reaches the server as an average alone.
        if not config.protected:
            rounds = config.num_server_rounds
            self._statistics = StatisticsLog(folder, rounds, model, strategy)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Record the rounds that are done within, however they end."""
        try:
            yield
            self._checkpoints.after_run(self._recorder.stopping)
        except (KeyboardInterrupt, SystemExit):
            # A signal ends a run in mid-round: it goes on after the last whole one.
            self._checkpoints.on_signal(self._recorder.stopping)
            raise
        finally:
            self._recorder.close()

    @property
    def continuity(self) -> Continuity:  # type: ignore[override]
        """What clients with a state folder must know of the checkpoints."""
        return self._checkpoints.continuity

    @property
    def finished(self) -> bool:  # type: ignore[override]
        """Whether early stopping ends the run."""
        stopping = self._recorder.stopping
        return stopping is not None and stopping.stops

    def begin(self, after: int) -> None:
        """Save where a new run begins, and start the clock of the first round."""
        if after == 0:
            # A run that is killed in round 1 can be continued, too.
            self._checkpoints.after_round(0)
        self._recorder.start_clock()

    def test(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Test the global model after a round that has a test."""
        # Flower also asks before round 1, where our runs test nothing.
        if server_round == 0:
            return None
        metrics = self._recorder.test(server_round, arrays)
        return MetricRecord(metrics) if metrics else None

    def replies(
        self, server_round: int, replies: Sequence[Reply], before: State, after: State
    ) -> None:
        """Compare the statistics in the replies with the global ones."""
        if self._statistics:
            self._statistics(server_round, replies, before, after)

    def end_round(
        self,
        server_round: int,
        arrays: ArrayRecord,
        metrics: Mapping[str, MetricRecord],
    ) -> None:
        """Write the lines of a round, and then its checkpoint if one is due."""
        # A resume cuts lines after its checkpoint off; absent ones it could not write.
        if self._statistics:
            self._statistics.write()
        self._recorder.write(self._strategy.run.report)
        self._checkpoints.after_round(server_round, self._recorder.stopping)

    def finish(
        self, result: Result, diverged: DivergedError | None = None
    ) -> dict[str, Any]:
        """Write the model, the curves and the summary, and return the summary.

        Args:
            result: of the strategy's ``start``.
            diverged: the error with which it ended.

        Raises:
            DivergedError: the run diverged, now or before it was resumed.
            NothingTrainedError: no round had enough usable replies.
        """
        lines = self._recorder.lines()
        # A run that diverged and is resumed does no further round.
        if not diverged and lines and ends_diverged(self._config, lines[-1]):
            advice = " ".join(self._strategy.advice(lines[-1]["round"]))
            diverged = divergence_of(lines[-1], advice, result)
        kept_previous = (
            line.get("kept-previous") and DIVERGED_AT not in line for line in lines
        )
        if not diverged and all(kept_previous):
            text = nothing_trained(self._config.min_replies, self._strategy.reports)
            raise NothingTrainedError(text, result)

        arrays = self._back_to_best() or result.arrays
        summary = self._recorder.finish(
            from_record(arrays), self._strategy, self._checkpoints.resumed_after
        )
        if diverged:
            raise diverged
        return summary

    def _back_to_best(self) -> ArrayRecord | None:
        """Return the best round's model, and bring the strategy back to that round.

        None without early stopping, or before any score.
        """
        if self._recorder.stopping is None:
            return None
        saved = self._checkpoints.checkpoints.best(self._recorder.stopping)
        if saved is None:
            return None
        # What was kept in memory has gone on: nothing has that of an earlier round.
        volatile = saved.strategy["kept"]["volatile"]
        if volatile:
            logger.warning(
                "client(s) %s kept their part in memory only: they go on with that of"
                " the last round, not of round %d, the best. Set state-dir, in the"
                " run's config or in each node's.",
                ", ".join(volatile),
                saved.server_round,
            )
        return self._strategy.go_back(
            to_record(saved.state), saved.strategy, saved.server_round
        )


def ends_diverged(config: Config, line: Mapping[str, Any]) -> bool:
    """Return whether a run ends with an error after the round of this line.

    Args:
        config: the settings.
        line: of ``metrics.jsonl``; {} = no round yet.
    """
    return config.on_divergence == "stop" and DIVERGED_AT in line


def divergence_of(
    line: Mapping[str, Any], advice: str, result: Result | None = None
) -> DivergedError:
    """Return the error of a run whose last round, with this line, diverged."""
    report = RoundReport(
        line["round"],
        line["phase"],
        diverged=line["diverged"],
        diverged_at=line[DIVERGED_AT],
    )
    return DivergedError(divergence(report, advice), report.diverged_at, result)
