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
from fedbn_flwr.errors import FIXED_LOST, code_of, raise_shared_config_error
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
        traffic: the counter of the bytes.
    """

    nodes: Sequence[Node] = ()
    messages: Sequence[Message] = ()
    at: float = field(default_factory=time.monotonic)
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
    if not nodes:
        return NOTHING
    extras, args = extras or {}, run.flower_args
    traffic.exchanges += 1
    for extra in extras.values():
        traffic.count_down(num_bytes(extra))

    # The messages share equal records: Flower's constructors would check and copy a
    # model for each node.
    first = Message(RecordDict(), nodes[0].node_id, message_type)
    local, fixed = frozenset(run.local_entries), run.fixed
    common = ConfigRecord(dict(config))
    naming = ConfigRecord({**config, **fixed.naming()}) if fixed.names else common
    phases, kept = run.methods.all_phases, run.kept
    stays = phases.local or phases.second_model or phases.keeps or phases.undo
    made: dict[frozenset[str], ArrayRecord] = {}
    messages = []
    for node in nodes:
        # Leave out the entries that the node has: its local state, and the fixed
        # entries.
        has = local if node.node_id in run.nodes.initialised else frozenset()
        if run.nodes.holding.get(node.node_id) == fixed.sha256:
            has |= fixed.names
        if has not in made:
            made[has] = select(arrays, arrays.keys() - has) if has else arrays
            # A broadcast counts once, for any number of receivers, as in the papers.
            traffic.count_down(num_bytes(made[has]))
        # Name the fixed entries in a message that contains them.
        entries = common if fixed.names & has else naming
        # Name the local state that the node continues from.
        if stays or kept.hashes or kept.is_resumed:
            entries = filled(ConfigRecord, {**entries, **kept.config(node)})
        records = {
            args.arrayrecord_key: made[has],
            **extras,
            args.configrecord_key: entries,
        }
        content = filled(RecordDict, records)
        messages.append(changed(first, content, dst_node_id=node.node_id))
    return Sent(nodes, messages, traffic=traffic)


# --- nodes that have lost the fixed entries ---------------------------------------------


def resent(
    run: Run, sent: Sent, replies: Iterable[Message], grid: Grid
) -> Iterator[Message]:
    """Yield the replies, with second replies of the nodes that lost fixed entries."""
    asked = {message.metadata.dst_node_id: message for message in sent.messages}
    again: list[Message] = []
    args = run.flower_args
    for reply in replies:
        node_id = reply.metadata.src_node_id
        has_lost = reply.has_error() and code_of(str(reply.error.reason)) == FIXED_LOST
        if has_lost and node_id in asked:
            # Send the message with the fixed entries, and with their names.
            message = whole_model(run, asked[node_id])
            config = of_kind(message.content, ConfigRecord)[args.configrecord_key]
            naming = ConfigRecord({**config, **run.fixed.naming()})
            message.content[args.configrecord_key] = naming
            again.append(message)
        else:
            yield reply
    if not again:
        return
    logger.info(
        "round %d: %d node(s) lost the entries that train_only leaves fixed, and get"
        " them again",
        run.report.server_round,
        len(again),
    )
    sent.traffic.exchanges += 1
    # Equal arrays for several nodes count as one broadcast.
    models = {tuple(one.content[args.arrayrecord_key]): one for one in again}
    for message in models.values():
        for record in of_kind(message.content, ArrayRecord).values():
            sent.traffic.count_down(num_bytes(record))
    yield from polling(grid).receive(again, timeout=run.start.timeout)


def whole_model(run: Run, message: Message) -> Message:
    """Return a message with the fixed entries, in the order of the model."""
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
    # Yield the replies in a fixed order, because sums of floats depend on their order.
    # A reply waits for the replies before it, while later clients still work.
    due = deque(sorted(sent.nodes))
    order_known = all(node.partition_id is not None for node in due)
    asked = {node.node_id for node in due}
    arrived: dict[int, Message] = {}
    strange: list[Message] = []
    for message in replies:
        node_id = message.metadata.src_node_id
        if node_id in asked:
            arrived.setdefault(node_id, message)
        else:
            strange.append(message)
        while order_known and due and due[0].node_id in arrived:
            node = due.popleft()
            yield node, arrived[node.node_id]

    # No more replies will come. All unread replies come after a missing reply.
    answers = [(run.nodes.identify_sender(reply), reply) for reply in arrived.values()]
    answers.sort(key=lambda answer: answer[0].order)
    note_answers(run, answers)
    report_missing(run, sent, {*arrived, *dropped}, strange)
    unread = {node.node_id for node in due}
    yield from [answer for answer in answers if answer[0].node_id in unread]


def note_answers(run: Run, answers: Sequence[tuple[Node, Message]]) -> None:
    """Note the entries that each node keeps, as its reply reports them."""
    nodes, without = run.nodes, []
    for node, reply in answers:
        if reply.has_error():
            # The client may have lost its local state: send it the whole state again.
            nodes.initialised.discard(node.node_id)
            nodes.holding.pop(node.node_id, None)
            continue
        sha256 = nodes.holding[node.node_id] = ReplyInfo.read(reply).fixed_sha256
        if sha256 != run.fixed.sha256:
            without.append(str(node))
    if run.kept.is_resumed:
        run.kept = run.kept.with_answers(answers)
    warning = (0, "the fixed entries")
    if run.fixed.names and without and warning not in run.start.warned:
        run.start.warned.add(warning)
        logger.warning(
            "%s: the app does not keep the entries that train_only leaves fixed, so they"
            " travel in each round. Make it `ClientApp(mods=[bn_mod])`, from"
            " fedbn_flwr.mods.",
            first_five(without),
        )


def report_missing(
    run: Run, sent: Sent, present: Collection[int], strange: Sequence[Message]
) -> None:
    """Report the asked nodes that are not ``present``, and all ``strange`` replies."""
    # The strange messages are, for example, errors whose sender is the SuperLink
    # instead of the lost node.
    others = ""
    if strange:
        texts = dict.fromkeys(
            error_text(message) if message.has_error() else "no error"
            for message in strange
        )
        text = f"replies from nodes never asked ({len(strange)}): {'; '.join(texts)}"
        logger.warning("%s", text)
        others = f"; {text}"
    missing = [node for node in sent.nodes if node.node_id not in present]
    if not missing:
        return
    seconds, timeout = time.monotonic() - sent.at, run.start.timeout
    why = f"no reply within {timeout:g} s{others}"
    if seconds < timeout:
        why = (
            f"no reply was passed on to the strategy ({seconds:.1f} s after its message"
            " was made): either none came, or the loop, a wrapper or an overridden"
            f" method left out the message or the reply{others}"
        )
    for node in missing:
        run.report.reject(node, why)
    # Log one line for all nodes, because a project may drop replies on purpose.
    names = first_five([str(node) for node in missing])
    logger.warning("round %d: %s: %s", run.report.server_round, names, why)


def all_refused(run: Run, sent: Sent, refused: Sequence[Refused]) -> bool:
    """Return whether all asked nodes were refused.

    The refusal of one node among several never ends a run, even if only this node was
    asked.
    """
    return len(refused) == len(sent.nodes) and run.may_end_by(len(refused))


def raise_shared_error(
    run: Run, sent: Sent, refused: Sequence[Refused], any_works: bool
) -> None:
    """Raise the ConfigError that all asked clients raised, if they raised one.

    Nothing is raised in a resumed run, or with ``any_works``: a client is known to
    work. The clients of several rounds count together, if a round asks only one.
    """
    if any_works or run.start.after or len(refused) != len(sent.nodes):
        return
    for reply in refused:
        error = reply.message.error if reply.message.has_error() else None
        run.start.reasons[reply.node.node_id] = str(error.reason) if error else ""
    reasons = [*run.start.reasons.values()]
    # An error that all clients raise comes from the config, so it ends the run.
    if run.may_end_by(len(reasons)):
        raise_shared_config_error(reasons, len(reasons))


def raise_shared_test_error(run: Run, sent: Sent, refused: Sequence[Refused]) -> None:
    """Raise the ConfigError of a test that all asked clients raised, if any.

    Nothing is raised in a resumed run, or if a client is known to work. A client works
    if it was tested before, or if it has trained and has not failed now.
    """
    failed = {reply.node.label for reply in refused}
    works = run.start.tested or bool(run.start.trained - failed)
    raise_shared_error(run, sent, refused, works)
