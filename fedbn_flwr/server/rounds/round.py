"""A round on one page: ``play_training``, then ``play_tests``, then ``close_round``.

The first two are generators, because Flower returns to its caller between sending
messages and reading the replies: each yields the messages, gets the replies, and yields
the result. They are two, because a class of a user's may leave one half out.
``server.strategy`` drives them, under any of Flower's loops.

``run_rounds`` is the loop of ``flwr.serverapp.strategy.Strategy.start``, which here may
begin at any round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedbn_flwr.compat.flower import log_start
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.server.rounds.dispatch import NOTHING, in_order
from fedbn_flwr.server.rounds.reestimation import reestimate_before_tests
from fedbn_flwr.server.rounds.testing import (
    address_tests,
    completed,
    read_tests,
    test_metrics,
)
from fedbn_flwr.server.rounds.training import (
    address_training,
    average_replies,
    note_kept,
    read_training,
    release,
    sample_for_training,
    sum_ahead,
    terms_of,
    training_metrics,
)
from fedbn_flwr.server.runs.failures import losses_not_finite, note_losses
from fedbn_flwr.server.runs.report import AVERAGED, average_metrics
from fedbn_flwr.server.runs.run import Run

if TYPE_CHECKING:  # the strategy calls the loop
    from fedbn_flwr.server.strategy import Strategy

__all__ = [
    "Played",
    "ShouldStop",
    "TestModel",
    "close_round",
    "play_tests",
    "play_training",
    "run_rounds",
]

logger = logging.getLogger("flwr")

Played = Generator[Any, Any, None]
TestModel = Callable[[int, ArrayRecord], MetricRecord | None]
ShouldStop = Callable[[int, Result], bool]


def play_training(
    run: Run, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
) -> Played:
    """Train for a round: yield the messages, get the replies, yield the new model and
    the metrics (or None).
    """
    run.open_round(number)
    nodes = sample_for_training(run, number, grid)
    facts = run.facts(number, run.travels)
    asks = run.methods.on_clients(run.states, facts)
    terms = run.protection.terms(terms_of(run, facts, asks))
    sent = address_training(run, facts, nodes, arrays, config, asks)

    # they travel
    messages = yield run.protection.open_round(run, sent.pairs, grid, run.timeout)

    # a synchronised step has reported those it lost
    received = in_order(run, sent, messages, run.report.rejected)
    ahead = sum_ahead(run, facts, sent, messages)
    # as they arrive, if they do so one by one
    usable, refused = read_training(run, sent, received, terms, ahead)
    replies = release(run, facts, usable)
    model = None
    if replies:
        model = facts.hold(average_replies(run, replies, ahead))
        model, run.states = run.methods.fold(run.states, facts, replies, model)
        model = {**facts.before, **model}
    note_kept(run, usable, refused, used=bool(replies))
    trained = None if model is None else to_record(model)
    yield trained, training_metrics(run, replies, model, usable)


def play_tests(
    run: Run, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
) -> Played:
    """Test the model after a round: yield the messages, get the replies, yield the
    metrics (or None).
    """
    run.arrays = arrays
    sent = NOTHING
    if run.tests_after(number):
        reestimate_before_tests(run, arrays, grid)
        sent = address_tests(run, number, arrays, config, grid)

    messages = yield sent.messages

    tests = read_tests(run, sent, messages)
    yield test_metrics(run, tests)


def close_round(run: Run, number: int, server_test: MetricRecord | None) -> None:
    """End a round: note the result of the server's own test, and tell ``on_round_end``."""
    if server_test is not None:
        run.metrics["evaluate_metrics_serverapp"] = server_test
        note_losses(run, losses_not_finite({"": server_test}))
    if run.options.on_round_end is not None:
        run.options.on_round_end(number, completed(run, run.arrays), dict(run.metrics))


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
        strategy: the strategy, prepared: its run has the model, and the last finished
            round.
        grid: the nodes.
        num_rounds: the last round of the run.
        train_config: further config of every training message.
        evaluate_config: further config of every evaluation message.
        test_model: tests the global model after a round; also called with 0 before
            round 1.
        should_stop: called after that test, with the model and the metrics so far;
            True = no further round.

    Returns:
        The model and the metrics of these rounds.
    """
    arrays, after = strategy.run.arrays, strategy.run.after
    logger.info("Starting %s strategy:", strategy.name)
    log_start(num_rounds, arrays, train_config, evaluate_config)
    strategy.summary()
    if after:
        logger.info("Continuing after round %d", after)
    train_config, evaluate_config = (
        train_config or ConfigRecord(),
        evaluate_config or ConfigRecord(),
    )
    result = Result(arrays=arrays)

    def test(server_round: int) -> MetricRecord | None:
        metrics = (
            test_model(server_round, strategy.for_evaluate_fn(server_round, arrays))
            if test_model
            else None
        )
        if metrics is not None:
            logger.info(
                "Evaluation of the global model, round %d: %s", server_round, metrics
            )
            result.evaluate_metrics_serverapp[server_round] = metrics
        return metrics

    if not after:
        test(0)
    for server_round in range(after + 1, num_rounds + 1):
        if strategy.stops_after(server_round - 1):
            break
        logger.info("[ROUND %d/%d]", server_round, num_rounds)
        messages = strategy.configure_train(server_round, arrays, train_config, grid)
        averaged, metrics = strategy.aggregate_train(
            server_round, strategy.send_training(messages, grid)
        )
        if averaged is not None:
            result.arrays = arrays = averaged
        if metrics is not None:
            logger.info(
                "Training%s: %s",
                _aggregation_note(strategy.train_metrics_aggr_fn),
                metrics,
            )
            result.train_metrics_clientapp[server_round] = metrics
        messages = strategy.configure_evaluate(
            server_round, arrays, evaluate_config, grid
        )
        metrics = strategy.aggregate_evaluate(
            server_round, strategy.send_tests(messages, grid)
        )
        if metrics is not None:
            logger.info(
                "Evaluation%s: %s",
                _aggregation_note(strategy.evaluate_metrics_aggr_fn),
                metrics,
            )
            result.evaluate_metrics_clientapp[server_round] = metrics
        tested = test(server_round)
        if should_stop is not None and should_stop(server_round, result):
            strategy.stopped = True
        strategy.end_round(server_round, tested)
    return result


def _aggregation_note(aggregate: object) -> str:
    """Return, for the log, that metrics are averages; "" for those of the user's own
    function.
    """
    return f" ({AVERAGED})" if aggregate is average_metrics else ""
