"""The loop of ``start``, and its differences from all other loops.

A strategy calls its loop at each difference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedbn_flwr.compat.flower import log_strategy_start_info
from fedbn_flwr.server.rounds import run_start, testing
from fedbn_flwr.server.rounds.recalibration import (
    collect_class_moments,
    reestimate_before_tests,
)
from fedbn_flwr.server.rounds.round import Played, open_half, read_half
from fedbn_flwr.server.runs import failures
from fedbn_flwr.server.runs.round_outcome import AVERAGED, average_metrics
from fedbn_flwr.server.runs.run_listener import RunListener
from fedbn_flwr.server.runs.run_state import Half
from fedbn_flwr.transport.polling_grid import polling

__all__ = ["Loop", "OwnLoop", "ShouldStop", "TestModel"]

logger = logging.getLogger("flwr")

Strategy: TypeAlias = Any
"""A ``server.strategy.Strategy``. Its module imports this one."""
TestModel = Callable[[int, ArrayRecord], MetricRecord | None]
ShouldStop = Callable[[int, Result], bool]


class Loop:
    """Flower's loop, its legacy loop, or a loop of the user's.

    It sends each message once, and it neither begins nor ends a run. The calls of a
    round do this.

    Attributes:
        is_own: whether the loop is ``start``.
        recording: the listener of the run, only used by ``start``.
    """

    is_own = False
    recording: RunListener | None = None

    def open_round(
        self, strategy: Strategy, server_round: int, arrays: ArrayRecord, grid: Grid
    ) -> None:
        """Begin the run before its first round."""
        # If round 1 comes again, the loop has started a new run.
        reports = strategy.reports
        if reports and server_round <= reports[0].server_round:
            strategy.forget_run()
        run = strategy.run
        run.set_model(arrays)
        run_start.check_wrapper(strategy.run)
        # ``to_legacy`` has begun the run.
        if not run.start.begun:
            strategy.begin()
            run.count_start(grid)
            if strategy.completes_tests and strategy.on_round_end is None:
                run_start.warn_of_own_start(run)

    def open_half(
        self,
        strategy: Strategy,
        configure: str,
        server_round: int,
        played: Played,
        arrays: ArrayRecord,
    ) -> Half:
        """Open one half of a round, after a half whose replies were never read."""
        run = strategy.run
        left = run.round.half
        if left is not None and left.was_left(arrays):
            read_half(run, strategy, left.configure, left.server_round, [])
            self.end_training(strategy)
        return open_half(run, configure, server_round, played, arrays)

    def to_send(
        self, strategy: Strategy, messages: Sequence[Message], grid: Grid
    ) -> tuple[Sequence[Message], Sequence[Message]]:
        """Return the messages for the loop to send, and the replies to all others."""
        if not strategy.run.synchronises:
            return messages, ()
        # The loop sends messages once, but a synchronised step sends several.
        return (), strategy.send_training(messages, grid)

    def end_training(self, strategy: Strategy) -> None:
        """Raise NothingTrainedError if no round so far had enough usable replies."""
        # Flower's loops would end without an error.
        failures.raise_if_nothing_trains(strategy.run)

    def end_tests(self, strategy: Strategy, server_round: int) -> None:
        """End the round, because this is the last call of a round."""
        strategy.end_round(server_round, None)
        failures.raise_if_ends(strategy.run)


class OwnLoop(Loop):
    """The loop of ``start``, which may begin after any round.

    Args:
        recording: the listener of the run.
        num_rounds: the number of rounds of the run.
        configs: the configs of training and of tests.
        test_model: the server's own test.
        should_stop: ends the run after a round.
    """

    is_own = True

    def __init__(
        self,
        recording: RunListener | None,
        num_rounds: int,
        configs: tuple[ConfigRecord, ConfigRecord],
        test_model: TestModel | None,
        should_stop: ShouldStop | None,
    ) -> None:
        self.recording = recording
        self.num_rounds, self.configs = num_rounds, configs
        self.test_model, self.should_stop = test_model, should_stop

    def open_round(
        self, strategy: Strategy, server_round: int, arrays: ArrayRecord, grid: Grid
    ) -> None:
        """Take the model of the round. ``prepare`` has begun the run."""
        strategy.run.set_model(arrays)
        run_start.check_wrapper(strategy.run)

    def to_send(
        self, strategy: Strategy, messages: Sequence[Message], grid: Grid
    ) -> tuple[Sequence[Message], Sequence[Message]]:
        """Return all messages, because this loop answers the exchanges of a step."""
        return messages, ()

    def end_training(self, strategy: Strategy) -> None:
        """Do nothing, because the end of ``start`` raises the errors."""

    def end_tests(self, strategy: Strategy, server_round: int) -> None:
        """Do nothing, because the server's own test follows."""

    def run(self, strategy: Strategy, grid: Grid) -> Result:
        """Run the rounds of a prepared run, and return the completed last model."""
        run = strategy.run
        run.count_start(grid)
        grid = polling(grid)
        if self.recording is not None:
            self.recording.begin(run.start.after)
        result = self.rounds(strategy, grid)

        # Complete the model of the result. A run that was stopped between two tests has
        # no statistics for its last weights yet.
        last = run.reports[-1].server_round if run.reports else self.num_rounds
        untested = not run.tests_after(last)
        if run.methods.reestimates and untested and not run.ends_diverged:
            reestimate_before_tests(run, result.arrays, grid)
        result.arrays = testing.completed(run, result.arrays)
        return result

    def rounds(self, strategy: Strategy, grid: Grid) -> Result:
        """Run the rounds like Flower's loop, but starting at any round."""
        arrays, after = strategy.run.arrays, strategy.run.start.after
        num_rounds, (train_config, test_config) = self.num_rounds, self.configs
        logger.info("Starting %s strategy:", strategy.name)
        log_strategy_start_info(num_rounds, arrays, *self.configs)
        strategy.summary()
        if after:
            logger.info("Continuing after round %d", after)
        result = Result(arrays=arrays)

        def test(server_round: int) -> MetricRecord | None:
            if self.test_model is None:
                return None
            model = strategy.for_evaluate_fn(server_round, arrays)
            metrics = self.test_model(server_round, model)
            if metrics is not None:
                logger.info(
                    "Evaluation of the global model, round %d: %s",
                    server_round,
                    metrics,
                )
                result.evaluate_metrics_serverapp[server_round] = metrics
            return metrics

        # As in Flower's loop, round 0 tests the initial model. A resumed run skips it.
        if not after:
            test(0)
        for server_round in range(after + 1, num_rounds + 1):
            if strategy.ends:
                break
            logger.info("[ROUND %d/%d]", server_round, num_rounds)

            # Train. Keep the last model if too few replies arrive for a new model.
            messages = strategy.configure_train(
                server_round, arrays, train_config, grid
            )
            replies = strategy.send_training(messages, grid)
            averaged, metrics = strategy.aggregate_train(server_round, replies)
            if averaged is not None:
                result.arrays = arrays = averaged
            if metrics is not None:
                note = _note(strategy.train_metrics_aggr_fn)
                logger.info("Training%s: %s", note, metrics)
                result.train_metrics_clientapp[server_round] = metrics

            # Test on the clients.
            messages = strategy.configure_evaluate(
                server_round, arrays, test_config, grid
            )
            replies = strategy.send_tests(messages, grid)
            metrics = strategy.aggregate_evaluate(server_round, replies)
            if metrics is not None:
                note = _note(strategy.evaluate_metrics_aggr_fn)
                logger.info("Evaluation%s: %s", note, metrics)
                result.evaluate_metrics_clientapp[server_round] = metrics

            # Test on the server. The result may stop the run after this round.
            tested = test(server_round)
            should_stop = self.should_stop
            if should_stop is not None and should_stop(server_round, result):
                strategy.stopped = True
            # Ask before the end of the round, which writes its traffic.
            run = strategy.run
            last = server_round == num_rounds or strategy.ends
            if last and run.methods.whole.class_moments and not run.ends_diverged:
                collect_class_moments(run, arrays, grid)
            strategy.end_round(server_round, tested)
        return result


def _note(aggregate: Any) -> str:
    """Return a note that metrics are averages, or "" for a user's own function."""
    return f" ({AVERAGED})" if aggregate is average_metrics else ""
