"""The messages that are sent to each node, and the senders of the replies.

A node receives the whole state until it is initialised, and only the shared entries
after that.

A node keeps the fixed entries of a run, and its messages lack them. If a node was
restarted, or another process of it works now, its app answers with an error of its own
code. It then gets the same message with the entries, in the same round.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.compat.flower import changed, filled, values_of
from fedbn_flwr.errors import (
    COMES_AGAIN,
    FIXED_LOST,
    ConfigError,
    code_of,
    raise_shared_config_error,
    split_code,
)
from fedbn_flwr.messages.protocol import FIXED_SHA256, SERVER_ROUND, ReplyInfo
from fedbn_flwr.messages.records import Traffic, num_bytes, of_kind, select
from fedbn_flwr.server.methods.method import Node
from fedbn_flwr.server.rounds.replies import Refused, error_text
from fedbn_flwr.server.runs.round_report import first_five
from fedbn_flwr.server.runs.run_state import Run
from fedbn_flwr.transport.polling_grid import polling

logger = logging.getLogger("flwr")


@dataclass(frozen=True)
class Sent:
    """The messages of one kind in a round.

    Attributes:
        nodes: the nodes asked.
        messages: a message for each node.
        at: the time of their creation, by ``time.monotonic``.
        timeout: seconds to wait for replies.
        traffic: the counter of the bytes.
    """

    nodes: Sequence[Node] = ()
    messages: Sequence[Message] = ()
    at: float = field(default_factory=time.monotonic)
    timeout: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)


NOTHING = Sent()


def address(
    run: Run,
    nodes: Sequence[Node],
    message_type: str,
    arrays: ArrayRecord,
    config: Mapping[str, Any],
    traffic: Traffic,
    extras: Mapping[str, ArrayRecord] | None = None,
) -> Sent:
    """Return a message for each node, and count the bytes.

    The same arrays for several nodes are counted as one broadcast.

    Args:
        run: the run.
        nodes: the receivers.
        message_type: Flower's type.
        arrays: the whole state.
        config: the config of all messages.
        traffic: the counter of the bytes.
        extras: further records.
    """
    extras = extras or {}
    # Each node lacks the entries that it has: its local state, and the fixed entries.
    local, fixed = frozenset(run.local_entries), run.fixed
    made: dict[frozenset[str], ArrayRecord] = {frozenset(): arrays}
    models = []
    for node in nodes:
        has = local if node.node_id in run.nodes.initialised else frozenset()
        if run.nodes.holding.get(node.node_id) == fixed.sha256:
            has |= fixed.names
        if has not in made:
            made[has] = select(arrays, arrays.keys() - has)
        models.append(made[has])
    # A broadcast counts once, for any number of receivers, as in the papers.
    traffic.exchanges += bool(nodes)
    for model in {id(model): model for model in models}.values():
        traffic.count_down(num_bytes(model))
    for extra in extras.values():
        traffic.count_down(num_bytes(extra))
    if not nodes:
        return Sent(timeout=run.start.timeout)

    # The messages share equal records: Flower's constructors would check and copy a
    # model for each node.
    first = Message(RecordDict(), nodes[0].node_id, message_type)
    common = ConfigRecord(dict(config))
    naming = ConfigRecord({**config, **fixed.naming()}) if fixed.names else common
    whole, kept = run.methods.all_phases, run.kept
    stays = whole.local or whole.second_model or whole.keeps or whole.undo
    messages = []
    for node, model in zip(nodes, models, strict=True):
        # Name the fixed entries in a message that contains them.
        sent = naming if fixed.names <= model.keys() else common
        # Name the local state that the node continues from.
        if stays or kept.hashes or kept.is_resumed:
            sent = filled(ConfigRecord, {**sent, **kept.config(node)})
        records = {
            run.flower_args.arrayrecord_key: model,
            **extras,
            run.flower_args.configrecord_key: sent,
        }
        content = filled(RecordDict, records)
        messages.append(changed(first, content, dst_node_id=node.node_id))
    return Sent(nodes, messages, timeout=run.start.timeout, traffic=traffic)


# --- nodes that have lost the fixed entries ---------------------------------------------


def resent(
    run: Run, sent: Sent, replies: Iterable[Message], grid: Grid
) -> Iterable[Message]:
    """Return the replies, with second replies of the nodes that lost fixed entries."""
    if not run.fixed.names:
        return replies
    found = _resent(run, sent, replies, grid)
    # The owner of a list may read whole replies, so the result is a list as well.
    return [*found] if isinstance(replies, list) else found


def _resent(
    run: Run, sent: Sent, replies: Iterable[Message], grid: Grid
) -> Iterator[Message]:
    asked = {message.metadata.dst_node_id: message for message in sent.messages}
    lost: list[Message] = []
    for reply in replies:
        node_id = reply.metadata.src_node_id
        has_lost = reply.has_error() and code_of(str(reply.error.reason)) == FIXED_LOST
        if has_lost and node_id in asked:
            lost.append(_whole(run, asked[node_id]))
        else:
            yield reply
    if not lost:
        return
    logger.info(
        "round %d: %d node(s) lost the entries that train_only leaves fixed, and get"
        " them again",
        run.report.server_round,
        len(lost),
    )
    sent.traffic.exchanges += 1
    # Equal arrays for several nodes count as one broadcast.
    key = run.flower_args.arrayrecord_key
    for message in {tuple(one.content[key]): one for one in lost}.values():
        for record in of_kind(message.content, ArrayRecord).values():
            sent.traffic.count_down(num_bytes(record))
    yield from polling(grid).receive(lost, timeout=run.start.timeout)


def _whole(run: Run, message: Message) -> Message:
    """Return the message with the fixed entries, and with their names."""
    whole, key = whole_reply(run, message), run.flower_args.configrecord_key
    config = of_kind(whole.content, ConfigRecord)[key]
    whole.content[key] = ConfigRecord({**config, **run.fixed.naming()})
    return whole


def whole_reply(run: Run, message: Message) -> Message:
    """Return a message with the fixed entries, in the order of the model.

    A user's own ``aggregate_train`` then sees whole models.
    """
    key = run.flower_args.arrayrecord_key
    records: dict[str, Any] = {}
    if message.has_content():
        records = dict(values_of(message.content))
    if key not in records:
        return message
    entries = {**values_of(records[key]), **values_of(run.fixed.record)}
    ordered = {name: entries[name] for name in run.parts.names if name in entries}
    records[key] = filled(ArrayRecord, ordered)
    return changed(message, filled(RecordDict, records))


def ask_who_holds(run: Run, nodes: Sequence[Node], grid: Grid) -> None:
    """Ask the nodes that have confirmed the fixed entries whether they still have them.

    In a synchronised step, the other clients wait for a node, so no message can be sent
    again there.
    """
    holding = run.nodes.holding
    asked = [node for node in nodes if holding.get(node.node_id) == run.fixed.sha256]
    if not run.fixed.names or not asked:
        return
    config: dict[str, Any] = {FIXED_SHA256: run.fixed.sha256}
    config[SERVER_ROUND] = run.report.server_round
    content = RecordDict({run.flower_args.configrecord_key: ConfigRecord(config)})
    queries = [Message(content, node.node_id, MessageType.QUERY) for node in asked]
    confirmed = {}
    for reply in grid.send_and_receive(queries, timeout=run.start.timeout):
        confirmed[reply.metadata.src_node_id] = ReplyInfo.read(reply).fixed_sha256
    for node in asked:
        holding[node.node_id] = confirmed.get(node.node_id, "")


# --- the replies ------------------------------------------------------------------------


def _warn_of_full_messages(run: Run, replies: Sequence[tuple[Node, Message]]) -> None:
    """Warn once if the apps do not keep the entries that ``train_only`` leaves fixed."""
    without = []
    for node, reply in replies:
        holds = run.nodes.holding.get(node.node_id) == run.fixed.sha256
        if not holds and not reply.has_error():
            without.append(str(node))
    warning = (0, "the fixed entries")
    if run.fixed.names and without and warning not in run.start.warned:
        run.start.warned.add(warning)
        logger.warning(
            "%s: the app does not keep the entries that train_only leaves fixed, so they"
            " travel in each round. Make it `ClientApp(mods=[bn_mod])`, from"
            " fedbn_flwr.mods.",
            first_five(without),
        )


def in_order(
    run: Run, sent: Sent, replies: Iterable[Message], dropped: Collection[int] = ()
) -> Iterator[tuple[Node, Message]]:
    """Yield the replies in the order of partition ids, and report missing replies.

    Each reply is yielded as soon as all replies before it have arrived. If a node may
    name its partition only in its reply, the function first waits for all replies. It
    ignores a reply from a node that was not asked, and reports it with each node that
    did not answer. If a node sends several replies, the first counts.

    Args:
        run: the run.
        sent: the messages that were sent.
        replies: the replies, in any order; some may not have arrived yet.
        dropped: ids of nodes that the report already names. No reply is expected from
            them.
    """
    asked = {node.node_id: node for node in sent.nodes}
    arrived: dict[int, Message] = {}
    strange: list[Message] = []
    yielded: list[tuple[Node, Message]] = []
    # Yield the replies in a fixed order, because sums of floats depend on their order.
    # A reply waits for the replies before it, while later clients still work.
    due: deque[Node] = deque()
    if all(node.partition_id is not None for node in sent.nodes):
        due.extend(sorted(sent.nodes))
    for message in replies:
        node_id = message.metadata.src_node_id
        if node_id not in asked:
            strange.append(message)
        else:
            arrived.setdefault(node_id, message)
        while due and due[0].node_id in arrived:
            reply = arrived[due.popleft().node_id]
            yielded.append((run.nodes.identify_sender(reply), reply))
            yield yielded[-1]

    # No more replies will come. All unread replies come after a missing reply.
    answered = {node.node_id for node, _ in yielded}
    rest = []
    for node_id, reply in arrived.items():
        if node_id not in answered:
            rest.append((run.nodes.identify_sender(reply), reply))
    # After an error, a client may have lost its local state: send it the whole state
    # again.
    for node_id, reply in arrived.items():
        if reply.has_error():
            run.nodes.initialised.discard(node_id)
            run.nodes.holding.pop(node_id, None)
        else:
            run.nodes.holding[node_id] = ReplyInfo.read(reply).fixed_sha256
    _warn_of_full_messages(run, [*yielded, *rest])
    if run.kept.is_resumed:
        run.kept = run.kept.with_answers([*yielded, *rest])
    others = _in_words(strange) if strange else ""
    missing: dict[str, list[str]] = {}
    for node in sent.nodes:
        if node.node_id not in arrived and node.node_id not in dropped:
            why = _no_reply(sent, others)
            run.report.reject(node, why)
            missing.setdefault(why, []).append(str(node))
    # Log one line for each reason, because a project may drop replies on purpose.
    for why, names in missing.items():
        logger.warning(
            "round %d: %s: %s", run.report.server_round, first_five(names), why
        )
    yield from sorted(rest, key=lambda pair: pair[0].order)


def _in_words(strange: Sequence[Message]) -> str:
    """Return, and log, a text about replies from nodes that were not asked."""
    # The strange messages are, for example, errors whose sender is the SuperLink
    # instead of the lost node.
    texts = dict.fromkeys(
        error_text(message) if message.has_error() else "no error"
        for message in strange
    )
    text = f"replies from nodes never asked ({len(strange)}): {'; '.join(texts)}"
    logger.warning("%s", text)
    return f"; {text}"


def _no_reply(sent: Sent, others: str) -> str:
    """Return the reason for a missing reply of a node, followed by ``others``."""
    seconds = time.monotonic() - sent.at
    if seconds >= sent.timeout:
        return f"no reply within {sent.timeout:g} s{others}"
    return (
        f"no reply was passed on to the strategy ({seconds:.1f} s after its message was"
        " made): either none came, or the loop, a wrapper or an overridden method left"
        f" out the message or the reply{others}"
    )


def raise_shared_error(
    run: Run, sent: Sent, refused: Sequence[Refused], any_works: bool
) -> None:
    """Raise the ConfigError that all asked clients raised, if they raised one.

    Nothing is raised in a resumed run, or with ``any_works``: a client is known to
    work. A client's error with the code ``COMES_AGAIN`` is always raised, because only
    the first messages of each process would train.
    """
    reasons = []
    for reply in refused:
        if reply.message.has_error():
            reason = str(reply.message.error.reason)
            reasons.append(reason)
            code, text = split_code(reason)
            if code == COMES_AGAIN:
                raise ConfigError(f"{reply.node}: {text}")
    # An error that all clients raise comes from the config, so it ends the run.
    if not any_works and not run.start.after:  # clients of a resumed run worked before
        raise_shared_config_error(reasons, len(sent.nodes))


def raise_shared_test_error(run: Run, sent: Sent, refused: Sequence[Refused]) -> None:
    """Raise the ConfigError of a test that all asked clients raised, if any.

    Nothing is raised in a resumed run, or if a client is known to work. A client works
    if it was tested before, or if it has trained and has not failed now.
    """
    failed = {reply.node.label for reply in refused}
    works = run.start.tested or bool(run.start.trained - failed)
    raise_shared_error(run, sent, refused, works)
