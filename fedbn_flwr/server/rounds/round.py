"""A round on one page: ``play_training``, then ``play_tests``, then ``close_round``.

The first two are generators, because Flower returns to its caller between sending
messages and reading the replies: each yields the messages, gets the replies, and yields
the result. They are two, because a class of a user's may leave one half out.
``server.strategy`` drives them, under any of Flower's loops.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

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
from fedbn_flwr.server.runs.failures import (
    losses_not_finite,
    note_losses,
    with_refusals,
)
from fedbn_flwr.server.runs.run import Run

__all__ = ["Played", "close_round", "play_tests", "play_training"]

Played = Generator[Any, Any, None]


def play_training(
    run: Run, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
) -> Played:
    """Train for a round: yield the messages, get the replies, yield the new model and
    the metrics (or None).
    """
    # Who trains, by which hooks of the methods, and what a reply must hold then.
    run.open_round(number)
    nodes = sample_for_training(run, number, grid)
    facts = run.facts(number, run.travels)
    with with_refusals(run):
        asks = run.methods.on_clients(run.states, facts)
    terms = terms_of(run, facts, asks)
    sent = address_training(run, facts, nodes, arrays, config, asks)

    # They travel. A protection may change the messages, and first exchange others of its
    # own, as for masks; what it returns is sent.
    messages = yield run.protection.protect_messages(
        facts, run.report, sent.pairs, grid, run.timeout
    )

    # Read the replies in the order of the clients, each as soon as all before it are
    # there; those that a synchronised step has lost are in the report, and not awaited.
    # Where all weights are known before, each is added to the sum while others still
    # work.
    received = in_order(run, sent, messages, run.report.rejected)
    ahead = sum_ahead(run, facts, sent, messages)
    usable, refused = read_training(run, sent, received, terms, ahead)
    replies = release(run, terms, usable)

    # Frozen entries come back as they were sent before the methods fold, so that these
    # see them. Entries that stay with the clients are in no reply: the last line keeps
    # the server's.
    model = None
    if replies:
        model = facts.with_frozen(average_replies(run, replies, ahead))
        model, run.states = run.methods.fold(run.states, facts, replies, model)
        model = {**facts.before, **model}

    # A method may undo a round whose replies were not used: then what the clients keep
    # since that round does not count either.
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
        # Before the model goes out: its test is with these statistics.
        if run.tests_need_statistics:
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
