"""The training and the tests of a round, before and after the clients' work.

Flower returns to its caller between sending messages and reading replies. A value
(``BegunTraining``, ``BegunTests``) has everything that is needed in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid

from fedbn_flwr.errors import ConfigError, NothingTrainedError
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.server.averaging import average
from fedbn_flwr.server.methods.method import Facts, Node
from fedbn_flwr.server.methods.params import RECALIBRATED
from fedbn_flwr.server.rounds.dispatch import (
    NOTHING,
    Sent,
    address,
    in_order,
    raise_shared_test_error,
)
from fedbn_flwr.server.rounds.recalibration import reestimate_before_tests
from fedbn_flwr.server.rounds.replies import (
    Terms,
    read_metrics,
    read_replies,
    tested_nothing,
    warn_of_far_values,
)
from fedbn_flwr.server.rounds.testing import completed
from fedbn_flwr.server.rounds.training import (
    kept_in_replies,
    note_kept,
    read_training,
    sample_for_training,
    sum_ahead,
    used_replies,
)
from fedbn_flwr.server.runs.failures import (
    losses_not_finite,
    note_losses,
    with_refusals,
)
from fedbn_flwr.server.runs.run_state import OnReplies, Run
from fedbn_flwr.training.settings import share_of

__all__ = [
    "BegunTests",
    "BegunTraining",
    "begin_tests",
    "begin_training",
    "finish_tests",
    "finish_training",
]


@dataclass(frozen=True)
class BegunTraining:
    """The training of a round, between its messages and their replies.

    Attributes:
        number: the round.
        arrays: the model in the messages, as the loop passed it.
        facts: the facts of the round.
        terms: the requirements for a reply.
        sent: the messages.
        early_replies: replies of a synchronised round, which runs during the call of
            ``configure_train``.
    """

    configured_by: ClassVar[str] = "configure_train"
    number: int
    arrays: ArrayRecord
    facts: Facts
    terms: Terms
    sent: Sent
    early_replies: Sequence[Message] = ()


@dataclass(frozen=True)
class BegunTests:
    """The tests of a round, between their messages and their replies."""

    configured_by: ClassVar[str] = "configure_evaluate"
    number: int
    sent: Sent


def begin_training(
    run: Run, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
) -> BegunTraining:
    """Determine the nodes and the hooks of a round, and make its messages.

    ``config`` has the user's entries.

    Raises:
        ConfigError: a client hook sends a record that no method declares.
    """
    run.open_round(number)
    nodes = sample_for_training(run, number, grid)
    facts = run.facts(number, run.round.phase)
    try:
        asks = run.methods.on_clients(run.states, facts)
    except NothingTrainedError as error:
        raise with_refusals(run, error) from None
    terms = Terms(
        strategy=run.methods.name,
        facts=facts,
        hooks=frozenset(ask.hook for ask in asks if not ask.shown),
        arrays_key=run.options.arrayrecord_key,
        count_key=run.options.weighted_by_key,
    )
    if not nodes:
        return BegunTraining(number, arrays, facts, terms, NOTHING)

    # A record is empty if only clients send it.
    records: dict[str, Any] = {record.key: {} for record in facts.phase.records}
    for ask in asks:
        undeclared = ask.sends.keys() - records.keys()
        if undeclared:
            raise ConfigError(
                f"client hook {ask.hook!r} sends record {min(undeclared)!r}, but no"
                " method declares it: add an Extra with this key to the result of"
                " phases()"
            )
        records |= ask.sends
    further = {key: to_record(state) for key, state in records.items()}
    # The user's entries come first, so the entries of the package and the methods
    # replace them.
    own = run.train_config(facts, asks, tuple(further))
    entries = {**config, **own, **run.protection.config()}
    run.report.asked = len(nodes)
    traffic = run.report.train
    sent = address(run, nodes, MessageType.TRAIN, arrays, entries, traffic, further)
    return BegunTraining(number, arrays, facts, terms, sent)


def finish_training(
    run: Run,
    training: BegunTraining,
    messages: Iterable[Message],
    on_replies: OnReplies | None = None,
    only_methods_read: bool = False,
) -> tuple[ArrayRecord | None, MetricRecord | None]:
    """Read the replies, and return the new model and the averaged metrics, if any.

    ``only_methods_read``: whether nobody but the methods reads a reply's arrays.
    """
    facts, sent = training.facts, training.sent
    if training.early_replies:
        messages = [*training.early_replies, *messages]
    # Read the replies in the order of the clients, each as soon as all replies before
    # it have arrived. Clients lost in a synchronised step are in the report, so do not
    # wait for them. If all weights are known in advance, add each reply to the sum
    # while other clients still work, and free its memory.
    received = in_order(run, sent, messages, run.report.rejected)
    ahead = sum_ahead(run, facts, sent)
    keep = kept_in_replies(facts, messages) if only_methods_read else None
    usable, refused = read_training(run, sent, received, training.terms, ahead, keep)
    replies = used_replies(run, facts, usable)

    # Frozen entries get the values that were sent. Do this before the methods fold, so
    # that the methods see these values. Replies lack the entries that stay with the
    # clients, so the last line keeps the server's values.
    model = None
    if replies:
        states = [reply.state for reply in replies]
        variance = run.methods.params.variance
        averaged = average(states, replies.weights, run.parts, variance, ahead)
        model = facts.with_frozen(averaged)
        model, run.states = run.methods.fold(run.states, facts, replies, model)
        model = {**facts.before, **model}

    # A method may undo a round whose replies were not used. Then the clients' local
    # state of that round does not count either.
    note_kept(run, usable, refused, used=bool(replies))
    if model is None:
        return None, None
    # A user's class may leave out the tests, which get the model as well.
    run.arrays = trained = to_record(model)
    if on_replies is not None:
        on_replies(training.number, replies, facts.before, model)
    # A protection hides single clients, so metrics are not averaged.
    if not run.protection.publishes_metrics:
        return trained, None
    contents = [one.message.content for one in usable]
    options = run.options
    metrics = options.train_metrics_aggr_fn(contents, options.weighted_by_key)
    run.report.metrics = {
        key: value for key, value in metrics.items() if isinstance(value, (int, float))
    }
    run.round.metrics["train_metrics_clientapp"] = metrics
    return trained, metrics


def begin_tests(
    run: Run, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
) -> BegunTests:
    """Make the messages that test the model after a round."""
    run.arrays = arrays
    if not run.tests_after(number):
        return BegunTests(number, NOTHING)
    # Re-estimate the statistics before the model is sent, because the clients test it
    # with them.
    if run.methods.reestimates or RECALIBRATED in run.methods.tests:
        reestimate_before_tests(run, arrays, grid)
    options = run.options
    # A protection hides the results of single clients.
    if options.fraction_evaluate == 0.0 or not run.protection.publishes_metrics:
        return BegunTests(number, NOTHING)
    least = options.min_evaluate_nodes
    present = run.present(grid, max(options.min_available_nodes, least))
    able = [node for node in present if not node.unusable]
    count = max(share_of(options.fraction_evaluate, len(able)), least)
    nodes = run.nodes.sample(able, count, "evaluate", number)
    entries = {**config, **run.test_config(number)}
    # A client without BN parts of its own is tested with the averaged parts, or with
    # the initial parts before the first average.
    model, traffic = completed(run, arrays), run.report.evaluate
    sent = address(run, nodes, MessageType.EVALUATE, model, entries, traffic)
    return BegunTests(number, sent)


def finish_tests(
    run: Run, tests: BegunTests, messages: Iterable[Message]
) -> MetricRecord | None:
    """Read the clients' tests, and return their averaged metrics, if any.

    The report gets the metrics of each client.
    """
    count_key = run.options.weighted_by_key

    def read(node: Node, message: Message) -> dict[str, float]:
        return read_metrics(message, count_key)

    # A client without test data is not a failure, but has nothing to average.
    received = [
        (node, message)
        for node, message in in_order(run, tests.sent, messages)
        if not tested_nothing(message, count_key)
    ]
    usable, refused = read_replies(received, read, run.report, "evaluation")
    raise_shared_test_error(run, tests.sent, refused)
    run.report.evaluations |= {test.node.label: test.read for test in usable}
    run.start.tested |= bool(usable)
    counts = {test.node: test.read[count_key] for test in usable}
    warn_of_far_values("its weight in the test", counts, run.start.warned)
    note_losses(run, losses_not_finite(run.report.evaluations, run.nodes.names))
    if not usable:
        return None
    contents = [test.message.content for test in usable]
    metrics = run.options.evaluate_metrics_aggr_fn(contents, count_key)
    run.round.metrics["evaluate_metrics_clientapp"] = metrics
    return metrics
