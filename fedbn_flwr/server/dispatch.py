"""The server's messages: what each node receives, and whose replies came back.

A node receives the whole state until it is initialised, and the shared entries after that. After a resume its messages
also name the hash of the state to restore, until it has answered once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.compat.flower import is_app_error
from fedbn_flwr.errors import raise_shared_config_error
from fedbn_flwr.messages.protocol import LOCAL_SHA256, USED_SHA256
from fedbn_flwr.messages.records import num_bytes, select
from fedbn_flwr.server.failures import error_text
from fedbn_flwr.server.nodes import Node, NodeRegistry
from fedbn_flwr.server.replies import Refused
from fedbn_flwr.server.report import Traffic
from fedbn_flwr.server.run_state import RunState

__all__ = ["Dispatcher"]

logger = logging.getLogger("flwr")


class Dispatcher:
    """Builds the messages of a run, sorts its replies, and raises an error that all of them have.

    Args:
        run: the run.
        nodes: the nodes of the run; the caller marks there which nodes are initialised.
        timeout: seconds to wait for replies.
        local: what stays with the clients.
        undoes_lost_rounds: whether a client whose reply is not used goes back to what it kept before that round.
        arrays_key: the name of the model's record.
        config_key: the name of the config's record.

    Attributes:
        run, nodes, timeout: as given.
    """

    def __init__(
        self,
        run: RunState,
        nodes: NodeRegistry,
        timeout: float,
        *,
        local: frozenset[Part],
        undoes_lost_rounds: bool,
        arrays_key: str,
        config_key: str,
    ) -> None:
        self.run = run
        self.nodes = nodes
        self.timeout = timeout
        self._local = local
        self._undoes_lost_rounds = undoes_lost_rounds
        self._arrays_key = arrays_key
        self._config_key = config_key
        self._asked: list[Node] = []
        self._num_asked = 0
        self._sent_at = 0.0
        self._expected_hashes: Mapping[str, str] | None = None
        self._answered: set[str] = set()

    def expect_hashes(self, hashes: Mapping[str, str]) -> None:
        """Send each node, until it answers, the hash of the state to restore: by label, "" for a missing label."""
        self._expected_hashes = dict(hashes)

    def address(
        self,
        nodes: Sequence[Node],
        message_type: str,
        arrays: ArrayRecord,
        config: Mapping[str, Any],
        traffic: Traffic,
        extras: Mapping[str, ArrayRecord] | None = None,
    ) -> list[Message]:
        """Return a message for each node and count its bytes; the same arrays to several nodes are one broadcast.

        Args:
            nodes: the receivers.
            message_type: Flower's type.
            arrays: the whole state.
            config: the config of all messages.
            traffic: counts the bytes.
            extras: further records.
        """
        local, extras = self.run.parts.select(self._local), extras or {}
        shared = select(arrays, arrays.keys() - set(local)) if local else arrays
        self._asked, self._num_asked, self._sent_at = list(nodes), len(nodes), time.monotonic()
        traffic.exchanges += bool(nodes)
        models = {n.node_id: shared if n.node_id in self.nodes.initialised else arrays for n in nodes}
        for model in {id(model): model for model in models.values()}.values():
            traffic.count_down(num_bytes(model))
        for extra in extras.values():
            traffic.count_down(num_bytes(extra))
        messages = []
        for node in nodes:
            content = RecordDict({self._arrays_key: models[node.node_id], **extras})
            hashes = {**self._expected_hash(node), **self._used_hash(node)}
            content[self._config_key] = ConfigRecord({**config, **hashes})
            messages.append(Message(content, node.node_id, message_type))
        return messages

    def in_order(self, replies: Iterable[Message], dropped: Collection[int] = ()) -> list[tuple[Node, Message]]:
        """Return the replies in the order of partition ids; report the nodes that did not answer.

        ``dropped`` are ids of nodes that the report names already, and from which no reply is expected.

        A reply that comes from none of the nodes asked is left out; it is reported with each node that did not answer.
        """
        asked, report = {node.node_id for node in self._asked}, self.run.report
        messages = list(replies)
        own = [message for message in messages if message.metadata.src_node_id in asked]
        pairs = [(self.nodes.identify_sender(message), message) for message in own]
        answered = {node.node_id for node, _ in pairs}
        self._answered |= {node.label for node, message in pairs if message.has_content() or is_app_error(message)}
        why = self._no_reply([message for message in messages if message.metadata.src_node_id not in asked])
        for node in self._asked:
            if node.node_id not in answered and node.node_id not in dropped:
                report.reject(node.node_id, f"{node}: {why}")
                logger.warning("round %d: %s: %s", report.server_round, node, why)
        self._asked = []
        return sorted(pairs, key=lambda pair: pair[0].order)

    def raise_shared_error(self, refused: Refused, any_works: bool) -> None:
        """Raise the ConfigError that all asked clients raised, unless a client is known to work (``any_works``)."""
        if not any_works and not self.run.after:  # clients of a resumed run worked before
            reasons = [str(message.error.reason) for _, message, _ in refused if message.has_error()]
            raise_shared_config_error(reasons, self._num_asked)

    def raise_shared_test_error(self, refused: Refused) -> None:
        """Raise the ConfigError of a test that all asked clients raised, unless a client is known to work.

        It is if it was tested before, or has trained and has not failed now.
        """
        failed = {node.label for node, _, _ in refused}
        self.raise_shared_error(refused, self.run.tested or bool(self.run.trained - failed))

    def _no_reply(self, strange: Sequence[Message]) -> str:
        """Return why there is no reply of a node: the time has passed, or the wait ended before, with other replies."""
        seconds = time.monotonic() - self._sent_at
        if seconds >= self.timeout:
            why = f"no reply within {self.timeout:g} s"
        else:
            why = f"no reply, and the wait ended after {seconds:.1f} s"
        said = dict.fromkeys(error_text(message) if message.has_error() else "no error" for message in strange)
        if strange:
            why += f"; replies from none of the nodes asked ({len(strange)}): {'; '.join(said)}"
            logger.warning("%s", why)
        return why

    def _expected_hash(self, node: Node) -> dict[str, str]:
        if self._expected_hashes is None or node.label in self._answered or node.partition_id is None:
            return {}  # an unknown node may hold the right state already
        return {LOCAL_SHA256: self._expected_hashes.get(node.label, "")}

    def _used_hash(self, node: Node) -> dict[str, str]:
        """Return the hash of what the node kept in its last round whose reply was used, if other rounds are undone.

        A node that may be a known client under a new node id gets none.
        """
        used = self.run.local_hashes
        if not self._undoes_lost_rounds or (used and node.partition_id is None and node.label not in used):
            return {}
        return {USED_SHA256: used.get(node.label, "")}
