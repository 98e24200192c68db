"""The server's messages: what each node is sent, and whose replies came back.

A node gets the whole state until it has had the common start, the shared entries from then on. After a resume it is
told the hash of what it shall go on from, until it has answered once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedbn_flwr.compat.flower import is_app_error
from fedbn_flwr.messages.protocol import LOCAL_SHA256
from fedbn_flwr.messages.records import num_bytes
from fedbn_flwr.server.nodes import Node, NodeRegistry
from fedbn_flwr.server.report import RoundReport, Traffic

__all__ = ["Dispatcher"]

logger = logging.getLogger("flwr")


class Dispatcher:
    """Addresses the messages of a run and puts its replies in order.

    Args:
        nodes: the nodes of the run; the caller notes there who has had the start.
        timeout: seconds to wait for replies.
        arrays_key: the record of the model.
        config_key: the record of what the clients are told.

    Attributes:
        timeout: as given.
    """

    def __init__(self, nodes: NodeRegistry, timeout: float, arrays_key: str, config_key: str) -> None:
        self.timeout = timeout
        self._nodes = nodes
        self._arrays_key = arrays_key
        self._config_key = config_key
        self._asked: list[Node] = []
        self._expected_hashes: Mapping[str, str] | None = None
        self._answered: set[str] = set()

    def expect_hashes(self, hashes: Mapping[str, str]) -> None:
        """Tell each node what it shall go on from, by label ("" where it is not in ``hashes``), until it answers."""
        self._expected_hashes = dict(hashes)

    def address(
        self,
        nodes: Sequence[Node],
        message_type: str,
        arrays: ArrayRecord,
        local: Sequence[str],
        told: Mapping[str, Any],
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
        models = {n.node_id: shared if n.node_id in self._nodes.initialised else arrays for n in nodes}
        for model in {id(model): model for model in models.values()}.values():
            traffic.count_down(num_bytes(model))
        for extra in extras.values():
            traffic.count_down(num_bytes(extra))
        messages = []
        for node in nodes:
            content = RecordDict({self._arrays_key: models[node.node_id], **extras})
            content[self._config_key] = ConfigRecord({**told, **self._expected_hash(node)})
            messages.append(Message(content, node.node_id, message_type))
        return messages

    def in_order(self, replies: Iterable[Message], report: RoundReport) -> list[tuple[Node, Message]]:
        """Return the replies by partition id; note the nodes that were asked and did not answer."""
        pairs = [(self._nodes.identify_sender(message), message) for message in replies]
        answered = {node.node_id for node, _ in pairs}
        self._answered |= {node.label for node, message in pairs if message.has_content() or is_app_error(message)}
        for node in self._asked:
            if node.node_id not in answered and node.node_id not in report.rejected:
                report.reject(node.node_id, f"{node}: no reply within {self.timeout:g} s")
                logger.warning("round %d: no reply from %s within %g s", report.server_round, node, self.timeout)
        self._asked = []
        return sorted(pairs, key=lambda pair: pair[0].order)

    def _expected_hash(self, node: Node) -> dict[str, str]:
        if self._expected_hashes is None or node.label in self._answered or node.partition_id is None:
            return {}  # who it is is not known: what it has kept may be what is expected
        return {LOCAL_SHA256: self._expected_hashes.get(node.label, "")}
