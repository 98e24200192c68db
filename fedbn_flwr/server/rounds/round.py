"""A round, with ``play_training``, ``play_tests`` and ``close_round`` in order.

``play_training`` and ``play_tests`` are generators, because Flower returns to its
caller between sending messages and reading replies: each yields the messages, receives
the replies, and yields the result. Each half of the round has its own generator,
because a user's class may leave out a half. ``open_half`` runs a generator up to its
messages, and ``read_half`` runs it to its end.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.server.rounds.dispatch import NOTHING, in_order
from fedbn_flwr.server.rounds.recalibration import reestimate_before_tests
from fedbn_flwr.server.rounds.testing import (
    address_tests,
    completed,
    read_tests,
    test_metrics,
)
from fedbn_flwr.server.rounds.training import (
    address_training,
    average_replies,
    kept_in_replies,
    note_kept,
    read_training,
    release,
    sample_for_training,
    sum_ahead,
    terms_of,
    training_metrics,
)
from fedbn_flwr.server.runs.failures import (
    losses_not_finite,
    note_losses,
    with_refusals,
)
from fedbn_flwr.server.runs.run_state import Half, Run

__all__ = [
    "Played",
    "close_round",
    "open_half",
    "play_tests",
    "play_training",
    "read_half",
]

Played = Generator[Any, Any, None]


def play_training(
    run: Run, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
) -> Played:
    """Train for a round. Yield the messages, then the new model and the metrics.

    The generator receives the replies in between. Model and metrics may be None.
    """
    # Determine the nodes, the methods' hooks, and the requirements for a reply.
    run.open_round(number)
    nodes = sample_for_training(run, number, grid)
    facts = run.facts(number, run.round.phase)
    with with_refusals(run):
        asks = run.methods.on_clients(run.states, facts)
    terms = terms_of(run, facts, asks)
    sent = address_training(run, facts, nodes, arrays, config, asks)

    messages = yield [message for _, message in sent.pairs]

    # Read the replies in the order of the clients, each as soon as all replies before
    # it have arrived. Clients lost in a synchronised step are in the report, so do not
    # wait for them. If all weights are known in advance, add each reply to the sum
    # while other clients still work, and free its memory.
    received = in_order(run, sent, messages, run.report.rejected)
    ahead = sum_ahead(run, facts, sent, messages)
    keep = kept_in_replies(run, facts, messages)
    usable, refused = read_training(run, sent, received, terms, ahead, keep)
    replies = release(run, terms, usable)

    # Frozen entries get the values that were sent. Do this before the methods fold, so
    # that the methods see these values. Replies lack the entries that stay with the
    # clients, so the last line keeps the server's values.
    model = None
    if replies:
        model = facts.with_frozen(average_replies(run, replies, ahead))
        model, run.states = run.methods.fold(run.states, facts, replies, model)
        model = {**facts.before, **model}

    # A method may undo a round whose replies were not used. Then the clients' local
    # state of that round does not count either.
    note_kept(run, usable, refused, used=bool(replies))
    trained = None if model is None else to_record(model)
    yield trained, training_metrics(run, replies, model, usable)


def play_tests(
    run: Run, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
) -> Played:
    """Test the model after a round. Yield the messages, then the metrics or None.

    The generator receives the replies in between.
    """
    run.arrays = arrays
    sent = NOTHING
    if run.tests_after(number):
        # Re-estimate the statistics before the model is sent, because the clients test
        # it with them.
        if run.tests_need_statistics:
            reestimate_before_tests(run, arrays, grid)
        sent = address_tests(run, number, arrays, config, grid)

    messages = yield sent.messages

    tests = read_tests(run, sent, messages)
    yield test_metrics(run, tests)


def close_round(run: Run, number: int, server_test: MetricRecord | None) -> None:
    """End a round. Record the server's own test, and call ``on_round_end``."""
    if server_test is not None:
        run.round.metrics["evaluate_metrics_serverapp"] = server_test
        note_losses(run, losses_not_finite({"": server_test}))
    if run.options.on_round_end is not None:
        run.options.on_round_end(
            number, completed(run, run.arrays), dict(run.round.metrics)
        )


def open_half(
    run: Run, configure: str, number: int, played: Played, arrays: ArrayRecord
) -> Half:
    """Run one half of a round up to its messages.

    Args:
        run: the run.
        configure: name of the strategy's method that makes the messages.
        number: the round.
        played: the generator of the half.
        arrays: the model, as the loop passed it.
    """
    run.round.delivery = None
    half = Half(configure, number, played, next(played), arrays)
    run.round.half = half
    return half


def read_half(
    run: Run, strategy: object, configure: str, number: int, replies: Iterable[Message]
) -> Any:
    """Run one half of a round to its end, and return its result.

    The result is None if the half never began.

    Raises:
        ConfigError: the method ``configure`` of the user's ``strategy`` did not call
            the method of this package in this round.
    """
    half, run.round.half = run.round.half, None
    opened = (half.configure, half.server_round) if half else None
    if half is None or opened != (configure, number) or not run.reports:
        # Nothing to read: a user's class may ask no client in a round.
        if [*replies] or not run.reports:
            raise ConfigError(
                f"{configure} of {type(strategy).__name__} did not call"
                f" super().{configure}(): call it, and remove the messages that you do"
                " not want from its result"
            )
        return None
    if half.early_replies:
        replies = [*half.early_replies, *replies]
    return half.played.send(replies)
