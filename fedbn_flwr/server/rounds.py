"""The loop over the rounds: that of ``flwr.serverapp.strategy.Strategy.start``, which here may begin at any round.

A round: ``configure_train`` samples nodes and makes messages, ``run_training`` sends them, ``aggregate_train`` checks
the replies and combines them, ``configure_evaluate`` re-estimates statistics if a test needs them,
``aggregate_evaluate`` reads the clients' tests, ``test_model`` tests the global model, and ``after_round`` ends the
round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedbn_flwr.compat.flower import log_start
from fedbn_flwr.server.method import Method
from fedbn_flwr.server.metrics import AVERAGED, average_metrics

__all__ = ["Evaluate", "run_rounds"]

logger = logging.getLogger("flwr")

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


def run_rounds(
    strategy: Method[Any],
    grid: Grid,
    arrays: ArrayRecord,
    *,
    after: int,
    num_rounds: int,
    timeout: float,
    train_config: ConfigRecord | None,
    evaluate_config: ConfigRecord | None,
    test_model: Evaluate,
    after_round: Callable[[int, Result], None],
) -> Result:
    """Run the rounds ``after`` + 1 to ``num_rounds``, or until the strategy stops.

    With ``after`` = 0 this is what Flower's loop does.

    Args:
        strategy: the strategy.
        grid: the nodes.
        arrays: the global model after round ``after``.
        after: the last finished round.
        num_rounds: the last round of the run.
        timeout: seconds to wait for the replies of an evaluation.
        train_config: further config of every training message.
        evaluate_config: further config of every evaluation message.
        test_model: tests the global model; also called with 0 before round 1.
        after_round: ends the round; called with the round and the model and the metrics so far.

    Returns:
        The model and the metrics of these rounds.
    """
    logger.info("Starting %s strategy:", type(strategy).__name__)
    log_start(num_rounds, arrays, train_config, evaluate_config)
    strategy.summary()
    if after:
        logger.info("Continuing after round %d", after)
    train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
    result = Result(arrays=arrays)

    def test(server_round: int) -> None:
        if (metrics := test_model(server_round, arrays)) is not None:
            logger.info("Evaluation of the global model, round %d: %s", server_round, metrics)
            result.evaluate_metrics_serverapp[server_round] = metrics

    if not after:
        test(0)
    for server_round in range(after + 1, num_rounds + 1):
        if strategy.stops_after(server_round - 1):
            break
        logger.info("[ROUND %d/%d]", server_round, num_rounds)
        messages = strategy.configure_train(server_round, arrays, train_config, grid)
        averaged, metrics = strategy.aggregate_train(server_round, strategy.run_training(server_round, messages, grid))
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
        test(server_round)
        after_round(server_round, result)
    return result


def _aggregation_note(aggregate: object) -> str:
    """Return, for the log, that metrics are averages; "" for those of the user's own function."""
    return f" ({AVERAGED})" if aggregate is average_metrics else ""
