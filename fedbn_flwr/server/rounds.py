"""The loop over the rounds: that of ``flwr.serverapp.strategy.Strategy.start``, which may begin after any round."""

from __future__ import annotations

from collections.abc import Callable
from logging import INFO

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.serverapp.strategy.strategy_utils import log_strategy_start_info

__all__ = ["run_rounds"]

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


def run_rounds(
    strategy: Strategy,
    grid: Grid,
    arrays: ArrayRecord,
    after: int,
    num_rounds: int,
    timeout: float,
    train_config: ConfigRecord | None,
    evaluate_config: ConfigRecord | None,
    evaluate_fn: Evaluate | None,
) -> Result:
    """Run the rounds ``after`` + 1 to ``num_rounds``; with ``after`` = 0 as Flower's loop does.

    Args:
        strategy: configures and aggregates, as Flower calls it.
        grid: the nodes.
        arrays: the global model after round ``after``.
        after: the last round that is done.
        num_rounds: the last round of all.
        timeout: seconds to wait for the replies of a message round.
        train_config: goes to the nodes with every training message.
        evaluate_config: goes to them with every evaluation message.
        evaluate_fn: tests the global model: before round 1, and after every round.

    Returns:
        The model and the metrics of the rounds done here; no arrays where no round gave any.
    """
    log(INFO, "Starting %s strategy:", type(strategy).__name__)
    log_strategy_start_info(num_rounds, arrays, train_config, evaluate_config)
    strategy.summary()
    if after:
        log(INFO, "Going on after round %d", after)
    told_train, told_evaluate = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
    result = Result()

    def test(server_round: int) -> None:
        if evaluate_fn and (found := evaluate_fn(server_round, arrays)) is not None:
            log(INFO, "Evaluation of the global model, round %d: %s", server_round, found)
            result.evaluate_metrics_serverapp[server_round] = found

    if not after:
        test(0)
    for server_round in range(after + 1, num_rounds + 1):
        log(INFO, "[ROUND %d/%d]", server_round, num_rounds)
        messages = strategy.configure_train(server_round, arrays, told_train, grid)
        replies = grid.send_and_receive(messages, timeout=timeout)
        averaged, metrics = strategy.aggregate_train(server_round, replies)
        if averaged is not None:
            result.arrays = arrays = averaged
        if metrics is not None:
            log(INFO, "Training: %s", metrics)
            result.train_metrics_clientapp[server_round] = metrics
        messages = strategy.configure_evaluate(server_round, arrays, told_evaluate, grid)
        replies = grid.send_and_receive(messages, timeout=timeout)
        metrics = strategy.aggregate_evaluate(server_round, replies)
        if metrics is not None:
            log(INFO, "Evaluation: %s", metrics)
            result.evaluate_metrics_clientapp[server_round] = metrics
        test(server_round)
    return result
