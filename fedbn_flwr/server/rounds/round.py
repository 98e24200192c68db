"""One round, from the sampled clients to the new model and its test.

``one_round`` is the algorithm. Its steps follow in its order, then ``one_test``. Flower
returns to its caller between sending messages and reading replies. Therefore
``one_round`` and ``one_test`` are generators: they yield the messages, receive the
replies, and yield the result. The caller is our ``start``, or a loop of Flower.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
)
from flwr.serverapp import Grid

from fedbn_flwr.batchnorm.averaging import RunningMean, average
from fedbn_flwr.batchnorm.not_averaged import repair
from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.errors import (
    MOD_ORDER,
    NOT_FINITE,
    ClientPartError,
    ConfigError,
    ReplyError,
)
from fedbn_flwr.messages.protocol import NUM_EXAMPLES
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.server.methods.method import Ask, Facts, Node, Replies, Reply
from fedbn_flwr.server.methods.params import RECALIBRATED
from fedbn_flwr.server.methods.phases import TRACKED
from fedbn_flwr.server.rounds.dispatch import (
    NOTHING,
    Sent,
    address,
    all_refused,
    ask_who_holds,
    in_order,
    raise_shared_error,
    raise_shared_test_error,
    resent,
)
from fedbn_flwr.server.rounds.recalibration import reestimate_before_tests
from fedbn_flwr.server.rounds.replies import (
    Refused,
    Terms,
    Usable,
    freed,
    read_metrics,
    read_replies,
    refuse,
    tested_nothing,
    warn_of_replies,
    warn_of_tests,
)
from fedbn_flwr.server.runs.failures import (
    note_losses,
    note_losses_of_clients,
    note_too_few,
)
from fedbn_flwr.server.runs.protection import Protection
from fedbn_flwr.server.runs.round_report import first_five
from fedbn_flwr.server.runs.run_state import OnReplies, Run
from fedbn_flwr.training.settings import share_of

__all__ = ["HalfRound", "one_round", "one_test"]

logger = logging.getLogger("flwr")

HalfRound = Generator[Any, Iterable[Message], None]
"""Yields the messages, receives the replies, and yields the result."""


def one_round(
    run: Run,
    number: int,
    arrays: ArrayRecord,
    config: ConfigRecord,
    grid: Grid,
    on_replies: OnReplies | None = None,
    only_methods_read: bool = False,
) -> HalfRound:
    """Train one round. The result is the new model and the averaged metrics, if any.

    Args:
        run: the run.
        number: the round.
        arrays: the model that is sent.
        config: the user's entries of the messages.
        grid: the nodes.
        on_replies: see ``Strategy``.
        only_methods_read: whether nobody but the methods reads a reply's arrays.

    Raises:
        ConfigError: a client hook sends a record that no method declares.
        NothingTrainedError: a method needs a used reply of an earlier round.
    """
    run.open_round(number)
    nodes = sample(run, number, grid)
    facts = run.facts(number, run.round.phase)
    asks = run.methods.on_clients(run.states, facts)
    if facts.phase.exchanges is not None:
        ask_who_holds(run, nodes, grid)
    sent = send(run, nodes, facts, asks, arrays, config)

    messages = yield sent.messages
    # The owner of a list of messages may still read whole replies.
    frees = only_methods_read and not isinstance(messages, list)
    messages = resent(run, sent, messages, grid)

    usable, refused, mean = read(run, facts, asks, sent, messages, frees)
    note_senders(run, sent, usable, refused)
    replies = used(run, facts, usable)
    model = new_model(run, facts, replies, mean) if replies else None
    note_kept(run, usable, refused, used=bool(replies))
    if model is None:
        yield None, None
        return
    # A user's class may leave out the tests, which get the model as well.
    run.arrays = trained = to_record(model)
    if on_replies is not None:
        on_replies(number, replies, facts.before, model)
    yield trained, averaged_metrics(run, usable)


# --- the steps of ``one_round`` --------------------------------------------------------


def sample(run: Run, number: int, grid: Grid) -> list[Node]:
    """Return the nodes that train in a round, drawn from those that can.

    A node can train if it has data and no mod that refuses; the others are reported.
    The result is empty if no node is supposed to train.

    Raises:
        ConfigError: no node can train.
        ClientPartError: a mod would refuse the replies of all nodes.
    """
    flower_args = run.flower_args
    if flower_args.fraction_train == 0.0:
        return []
    at_least = max(flower_args.min_available_nodes, flower_args.min_train_nodes)
    present = run.present(grid, at_least)
    # First report the nodes with unusable data, and the nodes that do not answer.
    for node in present:
        if node.unusable:
            run.report.reject(node, node.unusable)
    if present and all(node.unusable for node in present):
        raise ConfigError(f"no node can train; {present[0]}: {present[0].unusable}")
    for node_id, why in run.nodes.silent.items():
        run.report.reject(run.nodes.node(node_id), f"no answer to the query: {why}")

    # If ``num_examples`` is None, the app did not report it, so the node is asked to
    # train. If parts stay with the clients or are fixed, replies lack their entries: a
    # mod before ``bn_mod`` that expects the whole model would refuse every such reply.
    able = [node for node in present if node.num_examples != 0]
    partial = run.methods.local or run.fixed.names
    behind = [node for node in able if node.behind_mod] if partial else []
    for node in behind:
        run.report.reject(node, f"{node.refusal} {MOD_ORDER}.")
        able.remove(node)
    if behind and not able:
        raise ClientPartError(f"{behind[-1]}: {behind[-1].refusal} {MOD_ORDER}.")

    # N in the papers: the clients that can train, before some of them are sampled
    run.round.num_able = len(able)
    # Update these two even if the round is not used.
    run.most_able = max(run.most_able, len(able))
    run.seen.update(node.label for node in able if node.partition_id is not None)
    count = max(
        share_of(flower_args.fraction_train, len(able)), flower_args.min_train_nodes
    )
    nodes = run.nodes.sample(able, count, "train", number)
    run.report.missing = run.nodes.lost
    could_train = len(able) + len(run.report.missing)
    share = share_of(flower_args.fraction_train, could_train)
    run.report.expected = min(max(share, flower_args.min_train_nodes), could_train)
    logger.info("configure_train: Sampled %s nodes (out of %s)", len(nodes), len(able))
    return nodes


def send(
    run: Run,
    nodes: Sequence[Node],
    facts: Facts,
    asks: Sequence[Ask],
    arrays: ArrayRecord,
    config: ConfigRecord,
) -> Sent:
    """Return the training messages, with the model and the records of the hooks.

    Raises:
        ConfigError: a client hook sends a record that no method declares.
    """
    # A record is empty if only clients send it.
    records: dict[str, Any] = {record.key: {} for record in facts.phase.records}
    for hook in asks:
        undeclared = hook.sends.keys() - records.keys()
        if undeclared:
            raise ConfigError(
                f"client hook {hook.hook!r} sends record {min(undeclared)!r}, but no"
                " method declares it: add an Extra with this key to the result of"
                " phases()"
            )
        records |= hook.sends
    further = {key: to_record(state) for key, state in records.items()}
    # The user's entries come first, so the entries of the package and the methods
    # replace them.
    own = run.config(facts.number, facts, asks, tuple(further))
    entries = {**config, **own, **run.protection.config()}
    run.report.asked = len(nodes)
    traffic = run.report.train
    return address(run, nodes, MessageType.TRAIN, arrays, entries, traffic, further)


def running_mean(run: Run, facts: Facts, sent: Sent) -> RunningMean | None:
    """Return the mean to which each reply is added on arrival, or None if impossible.

    Such a mean requires that all weights are known before the replies, and that no
    protection changes the replies.
    """
    lost = run.report.rejected  # in a synchronised step
    nodes = sorted(sent.nodes)
    if type(run.protection) is not Protection or all(n.node_id in lost for n in nodes):
        return None
    weights = {node.node_id: node.num_examples or 0 for node in nodes}
    kind, key = facts.phase.weights, run.flower_args.weighted_by_key
    if kind == "equal":
        weights = dict.fromkeys(weights, 1)
    elif kind != "examples" or key != NUM_EXAMPLES:
        return None  # the weight is a metric of the replies
    # Without a number, only the node's reply contains the number.
    return RunningMean(weights, lost) if all(weights.values()) else None


def read(
    run: Run,
    facts: Facts,
    asks: Sequence[Ask],
    sent: Sent,
    messages: Iterable[Message],
    frees: bool,
) -> tuple[list[Usable[Reply]], list[Refused], RunningMean | None]:
    """Return the usable replies, the refused replies, both in order, and their mean.

    Replies are read in the order of the clients, each as soon as all replies before it
    have arrived, and added to the mean. In one process, other clients still work
    meanwhile. With ``frees``, a reply then loses the floating entries that no method
    reads in single replies: they are most of a model.
    """
    terms = Terms(
        strategy=run.methods.name,
        facts=facts,
        hooks=frozenset(ask.hook for ask in asks if not ask.unnamed),
        arrays_key=run.flower_args.arrayrecord_key,
        count_key=run.flower_args.weighted_by_key,
        fixed=run.fixed,
    )
    mean = running_mean(run, facts, sent)
    each = facts.phase.each
    frees = frees and Part.REST not in each
    # Layers that the method does not treat have running statistics as well.
    remain = facts.parts.whole.select(each | TRACKED)

    def read_one(node: Node, message: Message) -> Reply:
        reply = terms.read(node, message)
        terms.check(reply)
        run.protection.check(facts, reply)
        if mean is None:
            return reply
        # The first reply keeps its entries, because it defines the result's entries.
        is_first = not mean.sums
        mean.add(node.node_id, reply.state)
        return freed(reply, message, remain) if frees and not is_first else reply

    # Clients lost in a synchronised step are in the report, so do not wait for them.
    received = in_order(run, sent, messages, run.report.rejected)
    usable, refused = read_replies(received, read_one, run.report)

    # Refuse the replies that no honest client sends.
    far: dict[Node, str] = {}
    for method in run.methods:
        replies = [one.value for one in usable]
        far |= method.far(run.states[method.name], facts, replies)
    for one in usable:
        if one.node in far:
            mean = None  # it contains this reply
            error = ReplyError(far[one.node])
            refused.append(refuse(run.report, one.node, one.message, error))
    return [one for one in usable if one.node not in far], refused, mean


def note_senders(
    run: Run, sent: Sent, usable: Sequence[Usable[Reply]], refused: Sequence[Refused]
) -> None:
    """Report the senders of usable replies, and the clients without a usable reply.

    Raises:
        ClientPartError: no app has the method's client code.
        ConfigError: all clients raised it, and none has worked before.
    """
    # A refused client may have lost its local state: send it the whole state again.
    run.nodes.initialised.difference_update(lost.node.node_id for lost in refused)
    report, replies = run.report, [one.value for one in usable]
    report.replied = len(usable) + len(refused)
    answered = {reply.node.node_id for reply in replies}
    report.missing += [
        node.label for node in sent.nodes if node.node_id not in answered
    ]
    report.participants = [reply.node.partition_id for reply in replies]
    for reply in replies:
        run.nodes.initialised.add(reply.node.node_id)
        run.start.trained.add(reply.node.label)
        for size in reply.sizes:
            report.train.count_up(size)
        if run.protection.publishes_metrics:
            report.clients[reply.node.label] = dict(reply.metrics)

    # Raise the error of apps that do not work, if no app works, because every further
    # round would fail in the same way. If only some apps fail, their nodes may be the
    # reason: refuse their replies and continue.
    kinds = {type(lost.error) for lost in refused}
    if kinds == {ClientPartError} and all_refused(run, sent, refused):
        raise refused[0].error
    if refused:
        raise_shared_error(run, sent, refused, bool(run.start.trained))


def used(run: Run, facts: Facts, usable: Sequence[Usable[Reply]]) -> Replies:
    """Return the replies that the round uses, as the methods see them.

    The result is empty if too few are usable, or if most have values that are not
    finite.
    """
    report, replies = run.report, [one.value for one in usable]
    # Differential privacy always releases a result, even if it is only noise.
    always = run.protection.always_releases and report.asked
    if len(replies) < run.methods.params.min_replies and not always:
        note_too_few(run, len(replies))
        return Replies([])
    # The weights of a node may be too large for the training of the others.
    lost = [codes for codes in report.codes.values() if NOT_FINITE in codes]
    if run.start.far_model and len(lost) > len(replies):
        why = f"the values of {len(lost)} of {report.replied} replies are not finite"
        note_losses(run, [why])
        report.kept_previous = True
        return Replies([])
    run.not_finite_since = 0
    note_losses_of_clients(run, "clients")
    released = run.protection.pool(facts, report, replies)
    found = Replies(released, facts.phase.weights)
    warn_of_replies(run, usable, found)
    return found


def new_model(
    run: Run, facts: Facts, replies: Replies, mean: RunningMean | None
) -> dict[str, Any]:
    """Return the model after the round: the average, changed by the methods."""
    states = [reply.state for reply in replies]
    variance = run.methods.params.variance
    model = average(states, replies.weights, run.parts, variance, mean)
    # Frozen entries get the values that were sent, before the methods see them.
    model |= {name: facts.before[name] for name in facts.frozen}
    model, run.states = run.methods.fold(run.states, facts, replies, model)
    # Replies lack the entries that stay with the clients: keep the server's values.
    whole = {**facts.before, **model}
    repair(whole)
    return whole


def note_kept(
    run: Run, usable: Sequence[Usable[Reply]], refused: Sequence[Refused], used: bool
) -> None:
    """Record the local state of the clients that sent replies.

    If the method undoes rounds, record only the replies that were used. A client whose
    first round is undone has no local state, so it receives the whole state again.
    """
    replies = [one.value for one in usable]
    if not run.round.phase.undo:
        run.kept = run.kept.noted(replies, [(one.node, one.message) for one in refused])
    elif used:
        run.kept = run.kept.noted(replies)
    else:
        for reply in replies:
            if reply.node.label not in run.kept.hashes:
                run.nodes.initialised.discard(reply.node.node_id)


def averaged_metrics(run: Run, usable: Sequence[Usable[Reply]]) -> MetricRecord | None:
    """Return the averaged metrics, or None if a protection hides single clients."""
    if not run.protection.publishes_metrics:
        return None
    contents, flower_args = [one.message.content for one in usable], run.flower_args
    metrics = flower_args.train_metrics_aggr_fn(contents, flower_args.weighted_by_key)
    run.round.metrics["train_metrics_clientapp"] = metrics
    for key, value in metrics.items():
        if isinstance(value, (int, float)):
            run.report.metrics[key] = value
    return metrics


# --- the test of a round ---------------------------------------------------------------


def one_test(
    run: Run, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
) -> HalfRound:
    """Test the model after a round. The result is the averaged metrics, if any.

    The report gets the metrics of each client.
    """
    run.arrays, flower_args = arrays, run.flower_args
    sent = NOTHING
    if run.tests_after(number):
        # Re-estimate the statistics before the model is sent, because the clients test
        # it with them.
        if run.methods.reestimates or RECALIBRATED in run.methods.tests:
            reestimate_before_tests(run, arrays, grid)
        # A protection hides the results of single clients.
        if flower_args.fraction_evaluate != 0.0 and run.protection.publishes_metrics:
            least = flower_args.min_evaluate_nodes
            present = run.present(grid, max(flower_args.min_available_nodes, least))
            able = [node for node in present if not node.unusable]
            count = max(share_of(flower_args.fraction_evaluate, len(able)), least)
            nodes = run.nodes.sample(able, count, "evaluate", number)
            warn_of_untrained(run, nodes)
            # A client without BN parts of its own is tested with the averaged parts, or
            # with the initial parts before the first average.
            model, traffic = run.completed(arrays), run.report.evaluate
            entries = {**config, **run.test_config(number)}
            sent = address(run, nodes, MessageType.EVALUATE, model, entries, traffic)

    messages = yield sent.messages
    messages = resent(run, sent, messages, grid)

    key = flower_args.weighted_by_key
    # A client without test data is not a failure, but has nothing to average.
    answered = [*in_order(run, sent, messages)]
    received = [pair for pair in answered if not tested_nothing(pair[1], key)]
    if answered and not received:
        logger.warning(
            "round %d: all %d tests had zero examples, so the model is not tested. Give"
            " the clients test data, or set fraction_evaluate=0.",
            number,
            len(answered),
        )
    usable, refused = read_replies(
        received,
        lambda _, message: read_metrics(message, key),
        run.report,
        "evaluation",
    )
    if refused:
        raise_shared_test_error(run, sent, refused)
    warn_of_tests(run, usable)
    run.report.evaluations |= {test.node.label: test.value for test in usable}
    run.start.tested |= bool(usable)
    note_losses_of_clients(run, "evaluations")
    metrics: MetricRecord | None = None
    if usable:
        contents = [test.message.content for test in usable]
        metrics = flower_args.evaluate_metrics_aggr_fn(contents, key)
        run.round.metrics["evaluate_metrics_clientapp"] = metrics
    yield metrics


def warn_of_untrained(run: Run, nodes: Sequence[Node]) -> None:
    """Warn once of each client whose first test comes before its first training.

    Its local state is untrained, and its test lowers the mean over the clients.
    """
    known = run.start.trained.union(run.kept.hashes, run.start.untrained)
    new = [node for node in nodes if node.label not in known]
    if new and run.local_entries:
        run.start.untrained.update(node.label for node in new)
        logger.warning(
            "round %d: %s: tested before the first training, so the local state, such"
            " as '%s', is untrained. The mean over the clients contains these tests.",
            run.report.server_round,
            first_five([*map(str, new)]),
            run.local_entries[0],
        )
