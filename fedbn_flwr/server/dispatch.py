"""The server's mail: what each node is sent, and whose replies came back.

A node gets the whole state until it has had the common start, the shared entries from then on. After a resume it is
told the hash of what it shall go on from, until it has answered once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from logging import WARNING

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common import log
from flwr.common.constant import ErrorCode

from fedbn_flwr.messages.records import num_bytes
from fedbn_flwr.server.report import RoundReport, Traffic
from fedbn_flwr.server.nodes import Node, NodeRegistry

__all__ = ["Dispatcher"]


class Dispatcher:
    """Addresses the messages of a run and brings its replies in order.

    Args:
        roster: the nodes.
        timeout: seconds that are waited for replies.
        arrays_key: the record of the model.
        config_key: the record of what the clients are told.

    Attributes:
        roster: the nodes; the caller notes in it who has had the start.
        timeout: as given.
    """

    def __init__(self, roster: NodeRegistry, timeout: float, arrays_key: str, config_key: str) -> None:
        self.roster = roster
        self.timeout = timeout
        self._arrays_key = arrays_key
        self._config_key = config_key
        self._asked: list[Node] = []
        self._owed: Mapping[str, str] | None = None
        self._met: set[str] = set()

    def owe(self, hashes: Mapping[str, str]) -> None:
        """Tell each node what it shall go on from, by label ("" where it is not in ``hashes``), until it answers."""
        self._owed = dict(hashes)

    def address(
        self,
        nodes: Sequence[Node],
        message_type: str,
        arrays: ArrayRecord,
        local: Sequence[str],
        told: ConfigRecord,
        traffic: Traffic,
        extras: Mapping[str, ArrayRecord],
    ) -> list[Message]:
        """Return a message for each node, and count what they carry; the same arrays to several are one broadcast.

        Args:
            nodes: whom to ask.
            message_type: Flower's.
            arrays: the whole state.
            local: the names of the entries that stay with the clients.
            told: what the clients are told.
            traffic: where to count.
            extras: further records.
        """
        own = set(local)
        shared = ArrayRecord({name: array for name, array in arrays.items() if name not in own}) if own else arrays
        self._asked = list(nodes)
        traffic.exchanges += bool(nodes)
        started = {node.node_id: node.node_id in self.roster.started for node in nodes}
        for had_start in set(started.values()):
            traffic.count_down(num_bytes(shared if had_start else arrays))
        for extra in extras.values():
            traffic.count_down(num_bytes(extra))
        # By name, and with the start alone: a client that sees arrays and no model cannot tell the parts apart.
        first = ConfigRecord({**told, "local-entries": json.dumps(list(local))}) if local else told
        messages = []
        for node in nodes:
            model, config = (shared, told) if started[node.node_id] else (arrays, first)
            content = RecordDict({self._arrays_key: model, **extras})
            content[self._config_key] = self._with_hash(node, config)
            messages.append(Message(content, node.node_id, message_type))
        return messages

    def in_order(self, replies: Iterable[Message], report: RoundReport) -> list[tuple[Node, Message]]:
        """Return the replies by partition id; note the nodes that were asked and did not answer."""
        pairs = [(self.roster.met(message), message) for message in replies]
        answered = {node.node_id for node, _ in pairs}
        self._met |= {node.label for node, message in pairs if message.has_content() or _reached_client(message)}
        for node in self._asked:
            if node.node_id not in answered and node.node_id not in report.rejected:
                report.reject(node.node_id, f"{node}: no reply within {self.timeout:g} s")
                log(WARNING, "round %d: no reply from %s within %g s", report.server_round, node, self.timeout)
        self._asked = []
        return sorted(pairs, key=lambda pair: pair[0].order)

    def _with_hash(self, node: Node, config: ConfigRecord) -> ConfigRecord:
        if self._owed is None or node.label in self._met or node.partition_id is None:
            return config  # who it is is not known: what it has kept may be what is owed
        return ConfigRecord({**config, "local-sha256": self._owed.get(node.label, "")})


def _reached_client(error_reply: Message) -> bool:
    return error_reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
