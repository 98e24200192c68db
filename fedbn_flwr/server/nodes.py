"""The nodes of a run, by partition id, and seeded sampling among them.

Flower's node ids are new random numbers in every run. Partition ids are not: sampling, the order of sums and the
clients' random streams use these. Each node is asked once which partition it holds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.compat.flower import is_app_error
from fedbn_flwr.errors import ConfigError, EngineError
from fedbn_flwr.messages.protocol import NodeProperties, ReplyInfo
from fedbn_flwr.seeds import numpy_generator

__all__ = ["Node", "NodeRegistry"]

logger = logging.getLogger("flwr")


@dataclass(frozen=True)
class Node:
    """A node of the run; None where its app did not say.

    Attributes:
        node_id: Flower's.
        partition_id: which part of the data it holds.
        num_examples: training examples it holds.
        batch_size: of its first local step.
        unusable: why it cannot take part; "" where it can.
    """

    node_id: int
    partition_id: int | None = None
    num_examples: int | None = None
    batch_size: int | None = None
    unusable: str = ""

    @property
    def label(self) -> str:
        """The partition id, or the node id where there is none."""
        return str(self.node_id if self.partition_id is None else self.partition_id)

    @property
    def order(self) -> tuple[bool, int, int]:
        """Sorting key: by partition id, then the nodes without one by node id."""
        return self.partition_id is None, self.partition_id or 0, self.node_id

    def __str__(self) -> str:
        """Name the node in messages."""
        return f"node {self.node_id}" + ("" if self.partition_id is None else f" (partition {self.partition_id})")


class NodeRegistry:
    """The nodes seen so far in a run, and which of them have had the common start.

    Args:
        seed: of the sampling; each (purpose, round) draws from a stream of its own.
        timeout: seconds to wait for enough nodes, and for their answers.

    Attributes:
        initialised: the ids of the nodes that have had the common start.
        silent: node id to why a node did not say who it is when it was last asked; it is asked again.
    """

    def __init__(self, seed: int, timeout: float) -> None:
        self._seed = seed
        self._timeout = timeout
        self._nodes: dict[int, Node] = {}
        self.initialised: set[int] = set()
        self.silent: dict[int, str] = {}
        self._expected: set[str] = set()

    @property
    def initialised_labels(self) -> list[str]:
        """The labels of the nodes that have had the common start."""
        return sorted({self.node(node_id).label for node_id in self.initialised} | self._expected)

    def expect_initialised(self, labels: Iterable[str]) -> None:
        """Mark the nodes with these labels as initialised, each when it is first seen: node ids change."""
        self._expected = set(labels)

    def present(self, grid: Grid, at_least: int) -> list[Node]:
        """Return the connected nodes by partition id, asking new ones for it; wait until there are ``at_least``.

        Raises:
            EngineError: fewer nodes than needed are connected when the time is up.
        """
        node_ids = self._wait(grid, at_least)
        new = [node_id for node_id in node_ids if node_id not in self._nodes]
        self.silent = {}
        if new:
            self._nodes.update(self._distinct(self._ask(grid, new), set(node_ids)))
            self.initialised |= {i for i in new if i in self._nodes and self._nodes[i].label in self._expected}
            self._expected -= {self.node(i).label for i in self.initialised}
        known = (self._nodes[node_id] for node_id in node_ids if node_id in self._nodes)
        return sorted(known, key=lambda node: node.order)

    def sample(self, nodes: list[Node], count: int, purpose: str, server_round: int) -> list[Node]:
        """Return ``count`` of the nodes, drawn without replacement from the round's own stream, in their order."""
        if count >= len(nodes):
            return nodes
        drawn = numpy_generator(self._seed, f"sample-{purpose}", server_round).choice(len(nodes), count, replace=False)
        return [nodes[i] for i in sorted(drawn)]

    def node(self, node_id: int) -> Node:
        """Return the node; an unknown id has empty metadata."""
        return self._nodes.get(node_id, Node(node_id))

    def identify_sender(self, reply: Message) -> Node:
        """Return the node that sent a reply; one that did not answer the query may name its partition in the reply."""
        node = self.node(reply.metadata.src_node_id)
        own = ReplyInfo.read(reply).partition_id
        taken = {known.partition_id for known in self._nodes.values()}
        if node.partition_id is None and own is not None and own not in taken:
            node = self._nodes[node.node_id] = replace(node, partition_id=own)
        return node

    def _wait(self, grid: Grid, at_least: int) -> list[int]:
        deadline = time.monotonic() + self._timeout
        said = False
        while len(node_ids := list(grid.get_node_ids())) < at_least:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{len(node_ids)} node(s) connected after {self._timeout:g} s, {at_least} needed "
                    "(min_available_nodes). Start more nodes, or lower the minimum."
                )
            if not said:
                logger.info("Waiting for nodes: %d connected, %d needed.", len(node_ids), at_least)
                said = True
            time.sleep(0.1)
        return node_ids

    def _distinct(self, found: Mapping[int, Node], connected: set[int]) -> dict[int, Node]:
        """Return the new nodes whose partition no other connected node holds; the others are asked again later.

        Raises:
            ConfigError: two nodes claim the same partition from the start.
        """
        holders = {n.partition_id: n for n in self._nodes.values() if n.node_id in connected}
        distinct: dict[int, Node] = {}
        for node in sorted(found.values(), key=lambda node: node.order):
            holder = holders.get(node.partition_id) if node.partition_id is not None else None
            if holder is None:
                distinct[node.node_id] = holders[node.partition_id] = node
                continue
            problem = (
                f"{holder} and {node} both claim partition-id={node.partition_id}: give each SuperNode its own in "
                "--node-config."
            )
            if not self._nodes:
                raise ConfigError(problem)
            logger.warning("%s The second one is left out while the first is connected.", problem)
        return distinct

    def _ask(self, grid: Grid, node_ids: list[int]) -> Mapping[int, Node]:
        messages = [Message(RecordDict(), node_id, MessageType.QUERY) for node_id in node_ids]
        found: dict[int, Node] = {}
        for reply in grid.send_and_receive(messages, timeout=self._timeout):
            node_id = reply.metadata.src_node_id
            if reply.has_content():
                found[node_id] = Node(node_id, *astuple(NodeProperties.read(reply)))
                if found[node_id].unusable:
                    logger.warning("%s takes no part: %s", found[node_id], found[node_id].unusable)
            elif is_app_error(reply):  # the app has no answer to a query
                found[node_id] = Node(node_id)
            elif node_id in node_ids:  # on Flower's own grid the SuperLink answers for a lost node
                self.silent[node_id] = f"error {reply.error.code}: {reply.error.reason}"
        for node_id in node_ids:
            if node_id not in found:  # it may come back, and then its name matters: what it keeps goes by it
                why = self.silent.setdefault(node_id, "no answer")
                logger.warning("node %s did not say who it is (%s); asked again later", node_id, why)
        unnamed = [node_id for node_id, node in found.items() if node.partition_id is None]
        if unnamed:
            logger.warning(
                "%d of %d nodes did not answer the query for their partition id: until they tell it in a reply "
                "(ClientApp(mods=[local_bn])) their order is that of node ids, which change from run to run, and what "
                "is sampled or summed is not repeatable. To answer, wrap the app with fedbn_flwr.client_app, or "
                "register @app.query() and return answer_query(msg, context, loader).",
                len(unnamed),
                len(found),
            )
        return found
