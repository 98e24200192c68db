"""The loop over the rounds: that of ``flwr.serverapp.strategy.Strategy.start``, which here may begin at any round."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedbn_flwr.compat.flower import log_start
from fedbn_flwr.server.report import AVERAGED, average_metrics

if TYPE_CHECKING:  # the strategy calls this loop
    from fedbn_flwr.server.strategy import Strategy

__all__ = ["ShouldStop", "TestModel", "run_rounds"]

logger = logging.getLogger("flwr")

TestModel = Callable[[int, ArrayRecord], MetricRecord | None]
ShouldStop = Callable[[int, Result], bool]


def run_rounds(
    strategy: Strategy,
    grid: Grid,
    num_rounds: int,
    train_config: ConfigRecord | None,
    evaluate_config: ConfigRecord | None,
    test_model: TestModel | None,
    should_stop: ShouldStop | None,
) -> Result:
    """Run the rounds up to ``num_rounds``, or until the strategy stops.

    With a new run this is what Flower's loop does.

    Args:
        strategy: the strategy, prepared: its run has the model, and the last finished round.
        grid: the nodes.
        num_rounds: the last round of the run.
        train_config: further config of every training message.
        evaluate_config: further config of every evaluation message.
        test_model: tests the global model after a round; also called with 0 before round 1.
        should_stop: called after that test, with the model and the metrics so far; True = no further round.

    Returns:
        The model and the metrics of these rounds.
    """
    arrays, after, timeout = strategy.run.arrays, strategy.run.after, strategy.run.timeout
    logger.info("Starting %s strategy:", strategy.name)
    log_start(num_rounds, arrays, train_config, evaluate_config)
    strategy.summary()
    if after:
        logger.info("Continuing after round %d", after)
    train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
    result = Result(arrays=arrays)

    def test(server_round: int) -> MetricRecord | None:
        metrics = test_model(server_round, strategy.for_evaluate_fn(server_round, arrays)) if test_model else None
        if metrics is not None:
            logger.info("Evaluation of the global model, round %d: %s", server_round, metrics)
            result.evaluate_metrics_serverapp[server_round] = metrics
        return metrics

    if not after:
        test(0)
    for server_round in range(after + 1, num_rounds + 1):
        if strategy.stops_after(server_round - 1):
            break
        logger.info("[ROUND %d/%d]", server_round, num_rounds)
        messages = strategy.configure_train(server_round, arrays, train_config, grid)
        averaged, metrics = strategy.aggregate_train(server_round, strategy.send_training(messages, grid))
        if averaged is not None:
            result.arrays = arrays = averaged
        if metrics is not None:
            logger.info("Training%s: %s", _aggregation_note(strategy.train_metrics_aggr_fn), metrics)
            result.train_metrics_clientapp[server_round] = metrics
        messages = strategy.configure_evaluate(server_round, arrays, evaluate_config, grid)
        metrics = strategy.aggregate_evaluate(server_round, grid.send_and_receive(messages, timeout=timeout))
        if metrics is not None:
            logger.info("Evaluation%s: %s", _aggregation_note(strategy.evaluate_metrics_aggr_fn), metrics)
            result.evaluate_metrics_clientapp[server_round] = metrics
        tested = test(server_round)
        if should_stop is not None and should_stop(server_round, result):
            strategy.stopped = True
        strategy.end_round(server_round, tested)
    return result


def _aggregation_note(aggregate: object) -> str:
    """Return, for the log, that metrics are averages; "" for those of the user's own function."""
    return f" ({AVERAGED})" if aggregate is average_metrics else ""
