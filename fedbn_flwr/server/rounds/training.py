"""The training half of a round, from sampling clients to the new model.

``server.rounds.round`` calls the functions in this order.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.compat.flower import filled, values_of
from fedbn_flwr.errors import MOD_ORDER, NOT_FINITE, ClientPartError, ConfigError
from fedbn_flwr.messages.protocol import NUM_EXAMPLES
from fedbn_flwr.server.averaging import RunningMean
from fedbn_flwr.server.methods.method import Facts, Node, Replies, Reply
from fedbn_flwr.server.methods.phases import TRACKED
from fedbn_flwr.server.rounds.dispatch import Sent, raise_shared_error
from fedbn_flwr.server.rounds.replies import (
    Refused,
    Terms,
    Usable,
    read_replies,
    warn_of_far_values,
    warn_of_other_counts,
)
from fedbn_flwr.server.runs.failures import (
    losses_not_finite,
    note_losses,
    note_too_few,
    training_losses,
)
from fedbn_flwr.server.runs.protection import Protection
from fedbn_flwr.server.runs.run_state import Run
from fedbn_flwr.training.settings import share_of

logger = logging.getLogger("flwr")


def sample_for_training(run: Run, number: int, grid: Grid) -> list[Node]:
    """Return the nodes that train in a round.

    The result is empty if no node is supposed to train.
    """
    options = run.options
    if options.fraction_train == 0.0:
        return []
    at_least = max(options.min_available_nodes, options.min_train_nodes)
    able = _able_to_train(run, run.present(grid, at_least))
    # N in the papers: the clients that can train, before some of them are sampled
    run.round.num_able = len(able)
    # Update these two even if the round is not used.
    run.most_able = max(run.most_able, run.round.num_able)
    run.seen.update(node.label for node in able if node.partition_id is not None)
    count = max(share_of(options.fraction_train, len(able)), options.min_train_nodes)
    nodes = run.nodes.sample(able, count, "train", number)
    run.report.missing = run.nodes.lost
    could_train = run.round.num_able + len(run.report.missing)
    share = share_of(options.fraction_train, could_train)
    run.report.expected = min(max(share, options.min_train_nodes), could_train)
    logger.info(
        "configure_train: Sampled %s nodes (out of %s)", len(nodes), run.round.num_able
    )
    return nodes


def _able_to_train(run: Run, present: Sequence[Node]) -> list[Node]:
    """Return the nodes with data and without a mod that refuses, and report others.

    If parts stay with the clients, replies lack the entries of these parts. A mod
    before ``bn_mod`` that expects the whole model would refuse every such reply.

    Raises:
        ConfigError: no node can train.
        ClientPartError: a mod would refuse the replies of all nodes.
    """
    # First report the nodes with unusable data, and the nodes that do not answer.
    for node in present:
        if node.unusable:
            run.report.reject(node, node.unusable)
    if present and all(node.unusable for node in present):
        raise ConfigError(f"no node can train; {present[0]}: {present[0].unusable}")
    for node_id, why in run.nodes.silent.items():
        run.report.reject(run.nodes.node(node_id), f"no answer to the query: {why}")

    # If ``num_examples`` is None, the app did not report it, so the node is asked to
    # train.
    with_data = [node for node in present if node.num_examples != 0]
    if not run.methods.local:
        return with_data
    able = []
    why = ""
    for node in with_data:
        if node.behind_mod:
            why = f"{node.refusal} {MOD_ORDER}."
            run.report.reject(node, why)
        else:
            able.append(node)
    if why and not able:
        raise ClientPartError(f"{with_data[-1]}: {why}")
    return able


def sum_ahead(run: Run, facts: Facts, sent: Sent) -> RunningMean | None:
    """Return the sum that adds each reply on arrival, or None if impossible.

    Such a sum requires that all weights are known before the replies, and that no
    protection changes the replies.
    """
    lost = run.report.rejected  # in a synchronised step
    left = [node for node in sent.nodes if node.node_id not in lost]
    if not left or type(run.protection) is not Protection:
        return None
    nodes = sorted(sent.nodes)
    weights = {node.node_id: node.num_examples or 0 for node in nodes}
    kind, key = facts.phase.weights, run.options.weighted_by_key
    if kind == "equal":
        weights = dict.fromkeys(weights, 1)
    elif kind != "examples" or key != NUM_EXAMPLES:
        return None  # the weight is a metric of the replies
    # Without a number, only the node's reply contains the number.
    return RunningMean(weights, lost) if all(weights.values()) else None


def kept_in_replies(
    facts: Facts, messages: Iterable[Message]
) -> Collection[str] | None:
    """Return the entries that replies keep after they are added, or None for all.

    These are the entries that somebody reads in single replies. The other floating
    entries are most of a model, and their memory is freed.
    """
    # The owner of a list of messages may still read whole replies.
    if isinstance(messages, list):
        return None
    each = facts.phase.each
    return None if Part.REST in each else facts.parts.select(each | TRACKED)


def read_training(
    run: Run,
    sent: Sent,
    received: Iterable[tuple[Node, Message]],
    terms: Terms,
    ahead: RunningMean | None = None,
    keep: Collection[str] | None = None,
) -> tuple[list[Usable[Reply]], list[Refused]]:
    """Return the usable replies and the refused replies, in order, and report both.

    Each usable reply is added to ``ahead`` directly after reading. After that, it
    has only the entries ``keep``, unless ``keep`` is None.

    Raises:
        ClientPartError: no app has the method's client code.
        ConfigError: all clients raised it, and none has worked before.
    """

    def read(node: Node, message: Message) -> Reply:
        reply = terms.read(node, message)
        terms.check(reply)
        run.protection.check(terms.facts, reply)
        if ahead is None:
            return reply
        is_first = not ahead.sums
        ahead.add(node.node_id, reply.state)
        # The first reply keeps its entries, because it defines the result's entries.
        if keep is None or is_first:
            return reply
        return _without_arrays(reply, message, keep)

    usable, refused = read_replies(received, read, run.report)
    run.report.replied = len(usable) + len(refused)
    used = {one.read.node.node_id for one in usable}
    run.report.missing += [
        node.label for node in sent.nodes if node.node_id not in used
    ]
    # A refused client may have lost its local state: send it the whole state again.
    run.nodes.initialised.difference_update(lost.node.node_id for lost in refused)
    replies = [one.read for one in usable]
    # Record the clients that trained, with their metrics and bytes.
    for reply in replies:
        run.nodes.initialised.add(reply.node.node_id)
        for size in reply.sizes:
            run.report.train.count_up(size)
    run.report.participants = [reply.node.partition_id for reply in replies]
    if run.protection.publishes_metrics:
        run.report.clients = {
            reply.node.label: dict(reply.metrics) for reply in replies
        }
    run.start.trained.update(reply.node.label for reply in replies)
    warn_of_other_counts(replies, run.options.weighted_by_key, run.start.warned)

    # Raise the error of apps that do not work, if no app works, because every further
    # round would fail in the same way. If only some apps fail, their nodes may be the
    # reason: refuse their replies and continue.
    for lost in refused:
        if isinstance(lost.error, ClientPartError) and not usable:
            raise lost.error
    raise_shared_error(run, sent, refused, bool(run.start.trained))
    return usable, refused


def _without_arrays(reply: Reply, message: Message, keep: Collection[str]) -> Reply:
    """Return the reply with only some entries, and remove the arrays of the message."""
    # Copy the entries, because a view would keep the memory of the whole message.
    state = {
        name: array.copy()
        for name, array in reply.state.items()
        if name in keep or array.dtype.kind != "f"
    }
    # The app may keep the content of its reply, so do not change that object.
    records = values_of(message.content)
    others = {
        key: one for key, one in records.items() if not isinstance(one, ArrayRecord)
    }
    message.content = filled(RecordDict, others)
    return replace(reply, state=state)


def used_replies(run: Run, facts: Facts, usable: Sequence[Usable[Reply]]) -> Replies:
    """Return the replies that the round uses, as the methods see them.

    The result is empty if too few are usable, or if the protection releases nothing.
    """
    replies = [one.read for one in usable]
    # Differential privacy always releases a result, even if it is only noise.
    always = run.protection.always_releases and run.report.asked
    if len(replies) < run.methods.params.min_replies and not always:
        note_too_few(run, len(replies))
        return Replies([])
    # The weights of a node may be too large for the training of the others.
    lost = [codes for codes in run.report.codes.values() if NOT_FINITE in codes]
    if run.start.far_model and len(lost) > len(replies):
        why = (
            f"the values of {len(lost)} of {run.report.replied} replies are not finite"
        )
        note_losses(run, [why])
        run.report.kept_previous = True
        return Replies([])
    run.not_finite_since = 0
    losses = losses_not_finite(training_losses(run.report.clients), run.nodes.names)
    note_losses(run, losses)
    released = run.protection.pool(facts, run.report, replies)
    run.report.kept_previous = run.report.kept_previous or not released
    used = Replies(released, facts.phase.weights)
    if used and run.protection.publishes_metrics:
        _log_weights(run, used)
    return used


def _log_weights(run: Run, replies: Replies) -> None:
    """Log the largest share of a client, and warn about weights and models far off."""
    weights = {
        reply.node: weight
        for reply, weight in zip(replies, replies.weights, strict=True)
    }
    largest = max(weights, key=weights.__getitem__)
    share = weights[largest] / sum(weights.values())
    logger.info(
        "round %d: the largest share of one client is %.1f %% (%s)",
        run.report.server_round,
        100 * share,
        largest,
    )
    norms = {reply.node: reply.norm for reply in replies}
    warn_of_far_values("its weight in the average", weights, run.start.warned)
    far = warn_of_far_values("the norm of its model", norms, run.start.warned)
    run.start.far_model = far or run.start.far_model


def note_kept(
    run: Run, usable: Sequence[Usable[Reply]], refused: Sequence[Refused], used: bool
) -> None:
    """Record the local state of the clients that sent replies.

    If the method undoes rounds, record only the replies that were used. A client whose
    first round is undone has no local state, so it receives the whole state again.
    """
    replies = [one.read for one in usable]
    if not run.round.phase.undo:
        run.kept = run.kept.noted(replies, [(one.node, one.message) for one in refused])
    elif used:
        run.kept = run.kept.noted(replies)
    else:
        for reply in replies:
            if reply.node.label not in run.kept.hashes:
                run.nodes.initialised.discard(reply.node.node_id)
