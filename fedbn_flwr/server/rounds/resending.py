"""Fixed entries for the nodes that have lost them, in the same round.

A node keeps the fixed entries of a run, and its messages lack them. If a node was
restarted, or another process of it works now, its app answers with an error of its own
code. It then gets the same message with the entries.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.compat.flower import changed, filled, values_of
from fedbn_flwr.errors import FIXED_LOST, code_of
from fedbn_flwr.messages.protocol import FIXED_SHA256, SERVER_ROUND, ReplyInfo
from fedbn_flwr.messages.records import num_bytes, of_kind
from fedbn_flwr.server.methods.method import Node
from fedbn_flwr.server.rounds.dispatch import Sent
from fedbn_flwr.server.runs.run_state import Run
from fedbn_flwr.transport.polling_grid import polling

__all__ = ["ask_who_holds", "resent"]

logger = logging.getLogger("flwr")


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
    key = run.options.arrayrecord_key
    for message in {tuple(one.content[key]): one for one in lost}.values():
        for record in of_kind(message.content, ArrayRecord).values():
            sent.traffic.count_down(num_bytes(record))
    yield from polling(grid).receive(lost, timeout=run.start.timeout)


def _whole(run: Run, message: Message) -> Message:
    """Return the message with the fixed entries, and with their names."""
    whole, key = whole_reply(run, message), run.options.configrecord_key
    config = of_kind(whole.content, ConfigRecord)[key]
    whole.content[key] = ConfigRecord({**config, **run.fixed.naming()})
    return whole


def whole_reply(run: Run, message: Message) -> Message:
    """Return a message with the fixed entries, in the order of the model.

    A user's own ``aggregate_train`` then sees whole models.
    """
    key = run.options.arrayrecord_key
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
    content = RecordDict({run.options.configrecord_key: ConfigRecord(config)})
    queries = [Message(content, node.node_id, MessageType.QUERY) for node in asked]
    confirmed = {}
    for reply in grid.send_and_receive(queries, timeout=run.start.timeout):
        confirmed[reply.metadata.src_node_id] = ReplyInfo.read(reply).fixed_sha256
    for node in asked:
        holding[node.node_id] = confirmed.get(node.node_id, "")
