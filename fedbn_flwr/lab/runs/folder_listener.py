"""The recording of a federated run, with its checkpoints and results.

The strategy calls the listener while it does the rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result
from torch import nn

from fedbn_flwr.errors import DivergedError, NothingTrainedError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.output.checkpoint import CheckpointManager
from fedbn_flwr.lab.output.folder import (
    DIVERGED_AT,
    RunFolder,
)
from fedbn_flwr.lab.output.result_writer import OnRound, ResultWriter
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.server.runs.failures import divergence, nothing_trained
from fedbn_flwr.server.runs.round_outcome import RoundOutcome
from fedbn_flwr.strategies import Strategy

logger = logging.getLogger("flwr")


class FolderListener:
    """Tests the global model, and writes lines, checkpoints and results.

    ``Strategy.start`` gets the method ``test`` as ``evaluate_fn``, and ``open`` sets
    ``end_round`` as ``on_round_end``.
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
        self._writer = ResultWriter(folder, config, model, data, strategy, on_round)
        self._checkpoints = checkpoints
        self._folder = folder

    @contextmanager
    def open(self) -> Iterator[None]:
        """Record the rounds in the block, even if an error or a signal ends them."""
        self._strategy.on_round_end = self.end_round
        self._stop_if_due()  # a resumed run may have no round left
        try:
            yield
            self._checkpoints.after_run(self._writer.stopping)
        except (KeyboardInterrupt, SystemExit):
            # A signal ends a run in the middle of a round. The run resumes after the
            # last complete round.
            self._checkpoints.on_signal(self._writer.stopping)
            raise
        finally:
            # The function refers to the run's data and model.
            self._strategy.on_round_end = None
            self._writer.close()

    def _stop_if_due(self) -> None:
        """End the run before its next round if early stopping ends it."""
        stopping = self._writer.stopping
        if stopping is not None and stopping.stops:
            self._strategy.stopped = True

    def test(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Test the global model after a round that has a test."""
        # A new run asks for a test before round 1. Save the beginning instead, so that
        # a run that is killed in round 1 can be resumed.
        if server_round == 0:
            self._checkpoints.after_round(0)
            self._writer.start_clock()
            return None
        metrics = self._writer.test(server_round, arrays)
        return MetricRecord(metrics) if metrics else None

    def end_round(
        self,
        server_round: int,
        arrays: ArrayRecord,
        metrics: Mapping[str, MetricRecord],
    ) -> None:
        """Write the lines of a round, and then its checkpoint if one is due."""
        # Write the checkpoint last: a resume can remove lines after its checkpoint, but
        # cannot write missing lines.
        self._writer.write(self._strategy.run.report)
        self._stop_if_due()
        self._checkpoints.after_round(server_round, self._writer.stopping)

    def finish(
        self, result: Result, diverged: DivergedError | None = None
    ) -> dict[str, Any]:
        """Write the model, the curves and the summary, and return the summary.

        Args:
            result: the result of the strategy's ``start``.
            diverged: the error that ended the run; None without an error.

        Raises:
            DivergedError: the run diverged, now or before it was resumed.
            NothingTrainedError: no round had enough usable replies.
        """
        lines = self._writer.lines()
        # If the run was resumed after it had diverged, no round is done, so take the
        # divergence from the last line.
        if not diverged and lines and ends_diverged(self._config, lines[-1]):
            advice = " ".join(self._strategy.advice(lines[-1]["round"]))
            diverged = divergence_of(lines[-1], advice, result)
        kept_previous = (
            line.get("kept-previous") and DIVERGED_AT not in line for line in lines
        )
        if not diverged and all(kept_previous):
            text = nothing_trained(1, self._strategy.reports)
            raise NothingTrainedError(text, result)

        arrays = self._back_to_best() or result.arrays
        summary = self._writer.finish(
            from_record(arrays), self._checkpoints.resumed_after
        )
        if diverged:
            raise diverged
        return summary

    def _back_to_best(self) -> ArrayRecord | None:
        """Restore the strategy after the best round, and return the model of this round.

        Without early stopping, or without any score, do nothing and return None.
        """
        if self._writer.stopping is None:
            return None
        saved = self._checkpoints.checkpoints.best(self._writer.stopping)
        if saved is None:
            return None
        # Local state in memory is from the last round, because earlier states are lost.
        volatile = saved.strategy["kept"]["volatile"]
        if volatile:
            logger.warning(
                "client(s) %s kept their local state in memory only. They continue with"
                " the state of the last round, not of round %d, the best. Set"
                " state-dir, in the run's config or in each node's.",
                ", ".join(self._strategy.run.nodes.shown(volatile)),
                saved.server_round,
            )
        return self._strategy.go_back(
            to_record(saved.state), saved.strategy, saved.server_round
        )


def ends_diverged(config: Config, line: Mapping[str, Any]) -> bool:
    """Return whether a run ends with an error after the round of this line.

    Args:
        config: the settings.
        line: a line of ``metrics.jsonl``; {} before the first round.
    """
    return config.on_divergence == "stop" and DIVERGED_AT in line


def divergence_of(
    line: Mapping[str, Any], advice: str, result: Result | None = None
) -> DivergedError:
    """Return the error of a run that diverged.

    Args:
        line: the line of the run's last round.
        advice: the remedy for the message.
        result: the result of the run, if the strategy has one.
    """
    report = RoundOutcome(
        line["round"],
        line["phase"],
        diverged=line["diverged"],
        diverged_at=line[DIVERGED_AT],
    )
    return DivergedError(divergence(report, advice), report.diverged_at, result)
