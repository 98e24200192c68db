"""The loop over the rounds: that of ``flwr.serverapp.strategy.Strategy.start``, which may begin after any round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedbn_flwr.compat.flower import log_start

__all__ = ["RoundStrategy", "run_rounds"]

logger = logging.getLogger("flwr")

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


class RoundStrategy(Protocol):
    """What the loop calls, in this order: Flower's four calls of a round, and the training between the first two."""

    def summary(self) -> None:
        """See ``flwr.serverapp.strategy.Strategy``."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """See ``flwr.serverapp.strategy.Strategy``."""

    def run_training(self, server_round: int, messages: Iterable[Message], grid: Grid) -> Iterable[Message]:
        """Send the training messages; return the replies. A synchronised step has its exchanges here."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """See ``flwr.serverapp.strategy.Strategy``."""

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """See ``flwr.serverapp.strategy.Strategy``."""

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """See ``flwr.serverapp.strategy.Strategy``."""


def run_rounds(
    strategy: RoundStrategy,
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
        timeout: seconds to wait for the replies of an evaluation.
        train_config: goes to the nodes with every training message.
        evaluate_config: goes to them with every evaluation message.
        evaluate_fn: tests the global model: before round 1, and after every round.

    Returns:
        The model and the metrics of the rounds done here; no arrays where no round gave any.
    """
    logger.info("Starting %s strategy:", type(strategy).__name__)
    log_start(num_rounds, arrays, train_config, evaluate_config)
    strategy.summary()
    if after:
        logger.info("Going on after round %d", after)
    told_train, told_evaluate = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
    result = Result()

    def test(server_round: int) -> None:
        if evaluate_fn and (found := evaluate_fn(server_round, arrays)) is not None:
            logger.info("Evaluation of the global model, round %d: %s", server_round, found)
            result.evaluate_metrics_serverapp[server_round] = found

    if not after:
        test(0)
    for server_round in range(after + 1, num_rounds + 1):
        logger.info("[ROUND %d/%d]", server_round, num_rounds)
        messages = strategy.configure_train(server_round, arrays, told_train, grid)
        replies = strategy.run_training(server_round, messages, grid)
        averaged, metrics = strategy.aggregate_train(server_round, replies)
        if averaged is not None:
            result.arrays = arrays = averaged
        if metrics is not None:
            logger.info("Training: %s", metrics)
            result.train_metrics_clientapp[server_round] = metrics
        messages = strategy.configure_evaluate(server_round, arrays, told_evaluate, grid)
        replies = grid.send_and_receive(messages, timeout=timeout)
        metrics = strategy.aggregate_evaluate(server_round, replies)
        if metrics is not None:
            logger.info("Evaluation: %s", metrics)
            result.evaluate_metrics_clientapp[server_round] = metrics
        test(server_round)
    return result
