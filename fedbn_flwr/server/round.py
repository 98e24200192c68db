"""A round, from its first message to the end of its report, on one page.

It is a generator, because Flower returns to its caller between sending messages and reading the replies.
``server.strategy`` drives it, under any of Flower's loops.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fedbn_flwr.messages.records import to_record
from fedbn_flwr.server.dispatch import NOTHING, in_order
from fedbn_flwr.server.reestimation import reestimate_before_tests
from fedbn_flwr.server.run import Run
from fedbn_flwr.server.testing import address_tests, close_round, read_tests, test_metrics
from fedbn_flwr.server.training import (
    address_training,
    average_replies,
    forget_first_rounds,
    hold,
    read_training,
    release,
    sample_for_training,
    terms_of,
    training_metrics,
)

__all__ = ["Evaluation", "Round", "play_round"]

Round = Generator[Any, Any, None]


class Evaluation(NamedTuple):
    """What a round gets between training and tests: the model after training, a config for the tests, the nodes."""

    arrays: ArrayRecord
    config: ConfigRecord
    grid: Grid


def play_round(run: Run, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Round:
    """Play a round.

    It yields the training messages and gets the replies; yields the new model and the training metrics, each None if
    there is none, and gets an ``Evaluation``; yields the evaluation messages and gets the replies; yields the clients'
    metrics and gets those of the server's own test.
    """
    phase = run.open_round(number, arrays)
    undo = phase.travels.undo
    nodes = sample_for_training(run, number, grid)
    facts = run.facts(number, phase)
    asks = run.methods.on_clients(run.states, facts)
    terms = run.protection.terms(terms_of(run, facts, asks))
    sent = address_training(run, facts, nodes, arrays, config, asks)
    sent = sent.with_messages(run.protection.open_round(run, sent.pairs, grid, run.timeout))

    messages = yield sent.messages  # they travel

    received = in_order(run, sent, messages, run.report.rejected)
    usable = read_training(run, sent, received, terms)
    run.kept = run.kept.after_receipt(received, usable, undo)
    replies = release(run, facts, usable)
    model = None
    if replies:
        model = hold(average_replies(run, replies), facts)
        model, run.states = run.methods.fold(run.states, facts, replies, model)
        run.kept = run.kept.after_use(usable, undo)
    elif undo:
        forget_first_rounds(run, usable)
    trained = None if model is None else to_record({**facts.before, **model})

    evaluation = yield trained, training_metrics(run, replies, model, usable)

    run.arrays = evaluation.arrays
    sent = NOTHING
    if run.tests_after(number):
        reestimate_before_tests(run, evaluation.arrays, evaluation.grid)
        sent = address_tests(run, number, evaluation.arrays, evaluation.config, evaluation.grid)

    messages = yield sent.messages

    tests = read_tests(run, sent, messages)

    server_test = yield test_metrics(run, tests)

    close_round(run, number, server_test)
