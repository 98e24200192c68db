"""The nodes of a run, by partition id, and seeded sampling among them.

Flower's node ids are new random numbers in every run; partition ids stay the same. So
sampling, the order of sums and the clients' random streams use partition ids. The
server asks each node once which partition it holds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.compat.flower import is_app_error, is_mod_refusal, lacks_function
from fedbn_flwr.errors import (
    MOD_ON_QUERIES,
    MOD_ORDER,
    MOD_RAISED,
    ConfigError,
    EngineError,
    raise_shared_config_error,
    split_code,
)
from fedbn_flwr.messages.packing import FORMAT
from fedbn_flwr.messages.protocol import NodeProperties, ReplyInfo
from fedbn_flwr.messages.versions import differences, own_versions
from fedbn_flwr.seeds import derive_seed, numpy_generator
from fedbn_flwr.server.methods.node import Node
from fedbn_flwr.transport.polling_grid import ImmediateGrid, over_network

__all__ = ["NodeRegistry"]

logger = logging.getLogger("flwr")


class NodeRegistry:
    """The nodes seen so far in a run, and which of them are initialised.

    Args:
        seed: seed of the sampling; each (purpose, round) has a random stream of its
            own.
        timeout: seconds to wait for enough nodes, and for their answers.
        query_config: entries of the query: what a node must know to say whether it can
            take part.
        num_partitions: number of the parts that all nodes must agree on; None = that of
            the first node that says one.

    Attributes:
        initialised: ids of the nodes that have received the initial state.
        silent: node id to the reason why a node did not answer the last query; it is
            asked again.
    """

    def __init__(
        self,
        seed: int,
        timeout: float,
        query_config: Mapping[str, Any] | None = None,
        num_partitions: int | None = None,
    ) -> None:
        self._seed = seed
        self._num_partitions, self._said_by = num_partitions, "the split of the server"
        self._query_config = dict(query_config or {})
        self._timeout = timeout
        self._nodes: dict[int, Node] = {}
        self.initialised: set[int] = set()
        self.silent: dict[int, str] = {}
        self._expected: set[str] = set()
        self._connected: set[int] = set()  # at the last call of `present`
        # the connected nodes of the last call, as ids and in order
        self._sorted: tuple[list[int], list[Node]] = [], []

    @property
    def initialised_labels(self) -> list[str]:
        """The labels of the initialised nodes."""
        return sorted(
            {self.node(node_id).label for node_id in self.initialised} | self._expected
        )

    def expect_initialised(self, labels: Iterable[str]) -> None:
        """Mark the nodes with these labels as initialised when they are first seen."""
        self._expected = set(labels)

    def present(self, grid: Grid, at_least: int) -> list[Node]:
        """Wait for ``at_least`` connected nodes, query the new ones, and return all in
        the order of partition ids.

        Raises:
            EngineError: too few nodes are connected after the timeout.
            ConfigError: all nodes raised this error, two have the same partition id, or
                they are parts of other splits.
        """
        node_ids = self._wait(grid, at_least)
        self._connected = set(node_ids)
        if node_ids == self._sorted[0]:
            return self._sorted[1]
        new = [node_id for node_id in node_ids if node_id not in self._nodes]
        self.silent = {}
        if new:
            joins, found = bool(self._nodes), self._distinct(self._ask(grid, new))
            for node in found.values() if joins else ():
                logger.info("%s joins the run.", node)
            self._nodes.update(found)
            if isinstance(grid, ImmediateGrid):
                grid.name_nodes(found)
                grid.pack_for(node_id for node_id, node in found.items() if node.packs)
                if over_network(grid):
                    _advise_packing(found.values())
            self.initialised |= {
                i
                for i in new
                if i in self._nodes and self._nodes[i].label in self._expected
            }
            self._expected -= {self.node(i).label for i in self.initialised}
        known = [self._nodes[node_id] for node_id in node_ids if node_id in self._nodes]
        nodes = sorted(known, key=lambda node: node.order)
        # a node left out is asked again
        self._sorted = (node_ids if len(known) == len(node_ids) else []), nodes
        return nodes

    def sample(
        self, nodes: list[Node], count: int, purpose: str, server_round: int
    ) -> list[Node]:
        """Return ``count`` of the nodes in the same order, drawn without replacement
        with the round's own stream.
        """
        if count >= len(nodes):
            return nodes
        drawn = numpy_generator(self._seed, f"sample-{purpose}", server_round).choice(
            len(nodes), count, replace=False
        )
        return [nodes[i] for i in sorted(drawn)]

    def cohort(self, nodes: list[Node], count: int, number: int) -> list[Node]:
        """Return ``count`` of the nodes in the same order: the first of an order that
        the cohort of this number has.

        A node has its place in that order whoever else is there: where one is lost, the
        others of the cohort stay.
        """
        first = sorted(
            nodes,
            key=lambda node: derive_seed(self._seed, "cohort", number, node.label),
        )[:count]
        chosen = {node.node_id for node in first}
        return [node for node in nodes if node.node_id in chosen]

    def node(self, node_id: int) -> Node:
        """Return the node; an unknown id has empty metadata."""
        return self._nodes.get(node_id, Node(node_id))

    def identify_sender(self, reply: Message) -> Node:
        """Return the sender of a reply; a node that did not answer the query may name
        its partition in the reply.
        """
        node = self.node(reply.metadata.src_node_id)
        if (
            node.partition_id is not None
            or (own := ReplyInfo.read(reply).partition_id) is None
        ):
            return node
        if all(
            known.partition_id != own or i not in self._connected
            for i, known in self._nodes.items()
        ):
            node = self._nodes[node.node_id] = replace(node, partition_id=own)
            self._sorted = [], []
        return node

    def _wait(self, grid: Grid, at_least: int) -> list[int]:
        deadline = time.monotonic() + self._timeout
        said = False
        while len(node_ids := list(grid.get_node_ids())) < at_least:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{len(node_ids)} node(s) connected after {self._timeout:g} s,"
                    f" {at_least} needed (min_available_nodes). Start more nodes, or"
                    " lower the minimum."
                )
            if not said:
                logger.info(
                    "Waiting for nodes: %d connected, %d needed.",
                    len(node_ids),
                    at_least,
                )
                said = True
            time.sleep(0.1)
        return node_ids

    def _distinct(self, nodes: Mapping[int, Node]) -> dict[int, Node]:
        """Return the new nodes whose partition no other connected node holds; query the
        others again later.

        Parts of splits into different numbers share examples.

        Raises:
            ConfigError: two nodes have the same partition id from the start, or parts
                of different splits.
        """
        holders = {
            n.partition_id: n
            for n in self._nodes.values()
            if n.node_id in self._connected
        }
        distinct: dict[int, Node] = {}
        for node in sorted(nodes.values(), key=lambda node: node.order):
            problem, until = self._conflict(node, holders)
            if not problem:
                distinct[node.node_id] = holders[node.partition_id] = node
            elif not self._nodes:
                raise ConfigError(problem)
            else:
                logger.warning("%s %s", problem, until)
        return distinct

    def _conflict(
        self, node: Node, holders: Mapping[int | None, Node]
    ) -> tuple[str, str]:
        """Return why a new node cannot take part beside the others, and what happens to
        it; "" if it can.
        """
        holder = (
            holders.get(node.partition_id) if node.partition_id is not None else None
        )
        if holder is not None:
            return (
                (
                    f"{holder} and {node} both have partition-id={node.partition_id}:"
                    " give each SuperNode its own in --node-config."
                ),
                "The second one is left out while the first is connected.",
            )
        if (
            None in (node.num_partitions, self._num_partitions)
            or node.unusable
            or node.refusal
        ):
            return "", ""
        if not self._num_partitions:
            self._num_partitions, self._said_by = node.num_partitions, str(node)
        if node.num_partitions == self._num_partitions:
            return "", ""
        return (
            (
                f"{self._said_by} has num-partitions={self._num_partitions} and {node}"
                f" has num-partitions={node.num_partitions}: parts of different splits"
                " share examples. Give all SuperNodes the same number in"
                " --node-config."
            ),
            "The second one is left out.",
        )

    def _ask(self, grid: Grid, node_ids: list[int]) -> Mapping[int, Node]:
        answered = (
            grid.node_properties(self._query_config, node_ids)
            if isinstance(grid, ImmediateGrid)
            else {}
        )
        found = {
            node_id: _node(node_id, properties)
            for node_id, properties in answered.items()
        }
        content = RecordDict(
            {"config": ConfigRecord(self._query_config)} if self._query_config else {}
        )
        asked = set(node_ids) - found.keys()
        messages = [
            Message(content, node_id, MessageType.QUERY)
            for node_id in node_ids
            if node_id in asked
        ]
        reasons: list[str] = []
        for reply in (
            grid.send_and_receive(messages, timeout=self._timeout) if messages else ()
        ):
            node_id = reply.metadata.src_node_id
            if reply.has_content():
                said = NodeProperties.read(reply)
                found[node_id] = _node(node_id, said)
                if other := differences(own_versions(), said.versions):
                    logger.warning(
                        "%s: %s. Install one version everywhere.",
                        found[node_id],
                        "; ".join(dict(other)),
                    )
            elif is_mod_refusal(reply):
                found[node_id] = Node(
                    node_id, refusal=str(reply.error.reason), behind_mod=True
                )
            elif is_app_error(reply):  # the app has no answer to a query
                lacks = lacks_function(reply, f"{MessageType.QUERY}.default")
                found[node_id] = Node(
                    node_id, failure="" if lacks else _failure(str(reply.error.reason))
                )
                reasons.append(str(reply.error.reason))
                if not lacks:
                    logger.warning(
                        "%s: its answer to the query failed: %s",
                        found[node_id],
                        found[node_id].failure,
                    )
            elif node_id in asked:  # the SuperLink answers for a lost node
                self.silent[node_id] = f"error {reply.error.code}: {reply.error.reason}"
        if not self._nodes:
            raise_shared_config_error(reasons, len(node_ids))
        self._log_answers(found, node_ids)
        return found

    def _log_answers(self, found: Mapping[int, Node], node_ids: list[int]) -> None:
        """Warn of nodes that take no part, are silent, or did not say which partition
        they have.
        """
        for node in found.values():
            if node.unusable:
                logger.warning("%s takes no part: %s", node, node.unusable)
        for node_id in node_ids:
            # it may return, and its kept state is found by its partition id
            if node_id not in found:
                why = self.silent.setdefault(node_id, "no answer")
                logger.warning(
                    "node %s did not say who it is (%s); asked again later",
                    node_id,
                    why,
                )
        if refused := [node for node in found.values() if node.refusal]:
            logger.warning(
                "%d of %d nodes did not say what data they hold: %s %s.",
                len(refused),
                len(found),
                refused[0].refusal,
                MOD_ORDER,
            )
        nameless = (
            node
            for node in found.values()
            if node.partition_id is None and not node.refusal
        )
        unnamed = [node for node in nameless if not node.failure]
        if unnamed:
            logger.warning(
                "%d of %d nodes did not answer the query for their partition id. Until"
                " a reply names it (ClientApp(mods=[local_bn])), they are ordered by"
                " node ids, which change in every run: sampling, sums and what these"
                " clients draw are not repeatable. To answer, wrap the app with"
                " fedbn_flwr.client_app, or register @app.query() and return"
                " answer_query(msg, context, loader).",
                len(unnamed),
                len(found),
            )


def _advise_packing(nodes: Collection[Node]) -> None:
    """Log how many new nodes of a network take each array by itself."""
    if others := [node for node in nodes if not node.packs]:
        logger.info(
            "%d of %d nodes read no arrays in one piece; each array costs the server as"
            " much as two megabytes. Let the app answer the query (answer_query), with"
            " the mod packed of fedbn_flwr.mods as its first one.",
            len(others),
            len(nodes),
        )


def _node(node_id: int, said: NodeProperties) -> Node:
    of_data = said.partition_id, said.num_examples, said.batch_size
    said_else = said.unusable, said.refusal
    return Node(
        node_id,
        *of_data,
        *said_else,
        num_partitions=said.num_partitions,
        packs=said.packs == FORMAT,
    )


def _failure(reason: str) -> str:
    """Return the error in an answer to the query; where no mod is named, one before
    ours may have raised it.
    """
    code, text = split_code(reason)
    return (
        text if code == MOD_RAISED else f"{text}. If a mod raised it: {MOD_ON_QUERIES}"
    )
