"""The nodes of a run, by partition id, and seeded sampling among them.

Flower's node ids are new random numbers in every run, but partition ids do not change.
Therefore sampling, the order of sums and the clients' random streams use partition ids.
The server asks each node once for its partition.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.compat.flower import (
    QUERY_FUNCTION,
    is_app_error,
    is_mod_refusal,
    lacks_function,
)
from fedbn_flwr.errors import (
    MOD_ON_QUERIES,
    MOD_ORDER,
    ConfigError,
    EngineError,
    one_line,
    raise_shared_config_error,
    split_code,
)
from fedbn_flwr.messages.packing import FORMAT
from fedbn_flwr.messages.protocol import SERVER_ROUND, NodeProperties, ReplyInfo
from fedbn_flwr.messages.site_names import fault_of, with_name
from fedbn_flwr.messages.versions import differences
from fedbn_flwr.server.methods.method import Node
from fedbn_flwr.training.randomness import numpy_generator
from fedbn_flwr.transport.polling_grid import ImmediateGrid, PollingGrid, over_network

logger = logging.getLogger("flwr")


class NodeRegistry:
    """The nodes seen so far in a run, and the set of initialised nodes.

    Args:
        seed: seed of the sampling. Each pair of purpose and round has its own random
            stream.
        timeout: seconds to wait for enough nodes, and for their answers.
        query_config: entries of the query. They let a node determine whether it can
            take part.
        num_partitions: number of partitions that all nodes must report. 0 takes the
            number of the first node that reports one; None disables the check.
        site_names: the names that the data have for their partitions, by label; a node's
            ``site-name`` replaces it. With None no node gets a name, not even from its
            ``site-name``.

    Attributes:
        initialised: ids of the nodes that have received the initial state.
        holding: the hash of the fixed entries that each node has confirmed.
        silent: node id to the reason why a node did not answer the last query. Such a
            node is asked again.
    """

    def __init__(
        self,
        seed: int,
        timeout: float,
        query_config: Mapping[str, Any] | None = None,
        num_partitions: int | None = None,
        site_names: Mapping[str, str] | None = None,
    ) -> None:
        self._seed = seed
        self._timeout = timeout
        self._query_config = dict(query_config or {})
        self._num_partitions = num_partitions
        self._said_by = "the split of the server"  # source of ``_num_partitions``
        self._site_names = site_names
        self._app_is_mute = False  # whether the app has no function for queries
        self._told_of_unnamed = False
        self._nodes: dict[int, Node] = {}
        self.initialised: set[int] = set()
        self.holding: dict[int, str] = {}
        self.silent: dict[int, str] = {}
        # Labels of the nodes in the run that is resumed. Node ids would not do, because
        # this run has new ids.
        self._expected: set[str] = set()
        self._connected: set[int] = set()  # node ids at the last call of `present`

    # --- who is there -----------------------------------------------------------------

    def present(
        self,
        grid: Grid,
        at_least: int,
        server_round: int = 0,
        config_key: str = "config",
    ) -> list[Node]:
        """Wait for ``at_least`` connected nodes, and return all of them.

        New nodes are queried first. The nodes are in the order of partition ids.

        Args:
            grid: the nodes.
            at_least: the number of nodes to wait for.
            server_round: the round, for the config of the query.
            config_key: name of that config.

        Raises:
            EngineError: too few nodes are connected after the timeout.
            ConfigError: all nodes raised this error, two have the same partition id, or
                they have partitions of different splits.
        """
        node_ids = self._wait(grid, at_least)
        connected = set(node_ids)
        for node_id in (self._connected - connected) & self._nodes.keys():
            logger.warning(
                "%s is no longer connected; the run continues without it.",
                self._nodes[node_id],
            )
        for node_id in (connected - self._connected) & self._nodes.keys():
            logger.info("%s is connected again.", self._nodes[node_id])
        self._connected = connected
        self.silent = {}
        new = [node_id for node_id in node_ids if node_id not in self._nodes]
        if new:
            # Query the new nodes, and add those that answer and conflict with no other.
            config = {SERVER_ROUND: server_round, **self._query_config}
            query = RecordDict({config_key: ConfigRecord(config)})
            found = self._distinct(self._ask(grid, new, query))
            for node in found.values() if self._nodes else ():
                logger.info("%s joins the run.", node)
            self._nodes.update(found)
            if isinstance(grid, PollingGrid):
                grid.name_nodes(found)
                grid.pack_for(i for i, node in found.items() if node.packs)
                if over_network(grid):
                    _advise_packing(found.values())
            # A node of the run that is resumed has its local state, so it needs only
            # the shared entries.
            for node_id, node in found.items():
                if node.label in self._expected:
                    self.initialised.add(node_id)
            self._expected -= {self.node(i).label for i in self.initialised}
        # A node that is still unknown is asked again at the next call.
        return sorted(self._nodes[i] for i in node_ids if i in self._nodes)

    def node(self, node_id: int) -> Node:
        """Return the node, with empty metadata for an unknown id."""
        return self._nodes.get(node_id, Node(node_id))

    def identify_sender(self, reply: Message) -> Node:
        """Return the sender of a reply.

        A node that did not answer the query may name its partition in the reply, and
        its site.
        """
        node = self.node(reply.metadata.src_node_id)
        if node.partition_id is not None:
            return node
        info = ReplyInfo.read(reply)
        partition_id = info.partition_id
        if partition_id is None:
            return node
        # Only one node may have a partition, because a second node would get the local
        # state of the first.
        for node_id, other in self._nodes.items():
            if other.partition_id == partition_id and node_id in self._connected:
                return node
        node = self._named(replace(node, partition_id=partition_id), info.site_name)
        self._nodes[node.node_id] = node
        return node

    @property
    def lost(self) -> list[str]:
        """The labels of the nodes that could train and are no longer connected."""
        labels = set()
        for node_id, node in self._nodes.items():
            if node_id not in self._connected and node.num_examples != 0:
                labels.add(node.label)
        # Compare labels: a node with a new key has another id, but the same partition.
        here = {self.node(node_id).label for node_id in self._connected}
        return sorted(labels - here)

    @property
    def initialised_labels(self) -> list[str]:
        """The labels of the initialised nodes."""
        labels = {self.node(node_id).label for node_id in self.initialised}
        return sorted(labels | self._expected)

    def expect_initialised(self, labels: Iterable[str]) -> None:
        """Store the labels of nodes that count as initialised when first seen."""
        self._expected = set(labels)

    # --- who is drawn -----------------------------------------------------------------

    def sample(
        self, nodes: list[Node], count: int, purpose: str, server_round: int
    ) -> list[Node]:
        """Return ``count`` of the nodes in the same order.

        They are drawn without replacement, with the random stream of the round.
        """
        if count >= len(nodes):
            return nodes
        self._warn_of_unnamed(nodes)
        generator = numpy_generator(self._seed, f"sample-{purpose}", server_round)
        drawn = generator.choice(len(nodes), count, replace=False)
        return [nodes[i] for i in sorted(drawn)]

    def _warn_of_unnamed(self, nodes: Collection[Node]) -> None:
        """Warn once that a draw is not repeatable, because partitions are unknown."""
        unnamed = [
            node
            for node in nodes
            if node.partition_id is None and not node.refusal and not node.failure
        ]
        if unnamed and not self._told_of_unnamed:
            self._told_of_unnamed = True
            logger.warning(
                "%d of %d nodes did not report their partition id. Until a reply names"
                " it (ClientApp(mods=[bn_mod])), they are ordered by node ids. Node ids"
                " change in every run, so the draw of clients is not repeatable. To"
                " report it, wrap the app with fedbn_flwr.client_app, or register"
                " @app.query() and return answer_query(msg, context, loader). In Flower's"
                " legacy loop, return 'partition-id' from get_properties.",
                len(unnamed),
                len(nodes),
            )

    # --- their names ------------------------------------------------------------------

    @property
    def names(self) -> dict[str, str]:
        """The names of the sites by label, in the order of partition ids."""
        nodes = sorted(self._nodes.values())
        return {node.label: node.name for node in nodes if node.name}

    def with_names(self, labels: Iterable[str]) -> list[str]:
        """Return the labels with the names of the sites, for messages."""
        names = self.names
        return [with_name(label, names.get(label)) for label in labels]

    def _named(self, node: Node, name: str) -> Node:
        """Return a node with the name of its site, ``name`` or a name of the data."""
        if self._site_names is None:
            return node
        fault = fault_of(name) if name else ""
        if fault:
            logger.warning("%s: its site-name is ignored: %s", node, fault)
        # A node with its own data has a number, but no partition of the common data.
        if fault or not name:
            has_part = node.num_partitions is not None
            name = self._site_names.get(node.label, "") if has_part else ""
        return replace(node, name=name)

    # --- how they join, and leave ------------------------------------------------------

    def _wait(self, grid: Grid, at_least: int) -> list[int]:
        """Return the ids of the connected nodes as soon as there are enough.

        Raises:
            EngineError: there are too few nodes after the timeout.
        """
        deadline = time.monotonic() + self._timeout
        said = False
        while True:
            node_ids = list(grid.get_node_ids())
            if len(node_ids) >= at_least:
                return node_ids
            joins = not isinstance(grid, ImmediateGrid) or grid.nodes_may_join
            if not joins or time.monotonic() > deadline:
                after = f" after {self._timeout:g} s" if joins else ""
                raise EngineError(
                    f"{len(node_ids)} node(s) connected{after}, fewer than"
                    f" min_available_nodes={at_least}. Start more nodes, or lower the"
                    " minimum."
                )
            if not said:
                logger.info(
                    "Waiting for nodes: %d of %d are connected.",
                    len(node_ids),
                    at_least,
                )
                said = True
            time.sleep(0.1)

    def _ask(
        self, grid: Grid, node_ids: list[int], query: RecordDict
    ) -> dict[int, Node]:
        """Return the nodes that have answered the query, by id.

        The other nodes are noted in ``silent``.

        Raises:
            ConfigError: all nodes of a new run raised it.
        """
        found: dict[int, Node] = {}
        said: dict[int, NodeProperties] = {}
        # In one process, the grid has the answers, and no message is sent.
        if isinstance(grid, ImmediateGrid):
            said |= grid.node_properties(self._query_config, node_ids)
            if grid.answers_queries() is False:
                self._app_is_mute = True
        asked = [node_id for node_id in node_ids if node_id not in said]
        replies: list[Message] = []
        if asked and not self._app_is_mute:
            queries = [Message(query, i, MessageType.QUERY) for i in asked]
            replies += grid.send_and_receive(queries, timeout=self._timeout)
        reasons: list[str] = []
        for reply in replies:
            node_id = reply.metadata.src_node_id
            if reply.has_content():
                said[node_id] = NodeProperties.read(reply)
            elif is_mod_refusal(reply):
                refusal = one_line(str(reply.error.reason))
                found[node_id] = Node(node_id, refusal=refusal, behind_mod=True)
            elif lacks_function(reply, QUERY_FUNCTION):
                self._app_is_mute = True
            elif is_app_error(reply):
                reasons.append(str(reply.error.reason))
                failure = f"{one_line(split_code(reasons[-1])[1])}. If a mod raised it:"
                failure = f"{failure} {MOD_ON_QUERIES}"
                node = found[node_id] = Node(node_id, failure=failure)
                logger.warning("%s: its answer to the query failed: %s", node, failure)
            elif node_id in asked:  # the SuperLink answers for a lost node
                why = one_line(str(reply.error.reason))
                self.silent[node_id] = f"error {reply.error.code}: {why}"
        for node_id, properties in said.items():
            node = Node(
                node_id,
                partition_id=properties.partition_id,
                num_examples=properties.num_examples,
                batch_size=properties.batch_size,
                unusable=properties.unusable,
                refusal=properties.refusal,
                num_partitions=properties.num_partitions,
                packs=properties.packs == FORMAT,
            )
            found[node_id] = self._named(node, properties.site_name)
            # Only a node of a network has versions of its own.
            if properties.versions:
                _warn_of_versions(found[node_id], properties.versions)
        if self._app_is_mute:
            for node_id in asked:
                found.setdefault(node_id, Node(node_id))
        if reasons and not self._nodes:
            raise_shared_config_error(reasons, len(node_ids))
        for node_id in node_ids:
            if node_id not in found:
                self.silent.setdefault(node_id, "no answer")

        # Warn about nodes that take no part, are silent, or have a mod that refused.
        for node in found.values():
            if node.unusable:
                logger.warning("%s takes no part: %s", node, node.unusable)
        for node_id, why in self.silent.items():
            logger.warning(
                "node %s did not answer the query (%s); it is asked again later",
                node_id,
                why,
            )
        refused = [node for node in found.values() if node.refusal]
        if refused:
            logger.warning(
                "%d of %d nodes did not report their data: %s %s.",
                len(refused),
                len(found),
                refused[0].refusal,
                MOD_ORDER,
            )
        return found

    def _distinct(self, nodes: Mapping[int, Node]) -> dict[int, Node]:
        """Return the new nodes whose partition no other connected node has.

        The other nodes are queried again later. If two nodes split the data into
        different numbers of partitions, their partitions share examples.

        Raises:
            ConfigError: two nodes have the same partition id at the start of the run,
                or partitions of different splits.
        """
        holders: dict[int | None, Node] = {}
        for node in self._nodes.values():
            if node.partition_id is not None and node.node_id in self._connected:
                holders[node.partition_id] = node
        distinct: dict[int, Node] = {}
        # Use a fixed order instead of the order of arrival, because the order decides
        # which of two nodes is left out.
        for node in sorted(nodes.values()):
            problem = self._conflict(node, holders.get(node.partition_id))
            if not problem:
                distinct[node.node_id] = node
                if node.partition_id is not None:
                    holders[node.partition_id] = node
            elif not self._nodes:
                raise ConfigError(problem)
            else:
                logger.warning("%s The second node is left out.", problem)
        return distinct

    def _conflict(self, node: Node, holder: Node | None) -> str:
        """Return the reason why a new node cannot take part, or "" if it can.

        ``holder`` is the connected node that has the partition of the new node.
        """
        if holder is not None:
            return (
                f"{holder} and {node} both have"
                f" partition-id={node.partition_id}: give each SuperNode its own in"
                " --node-config."
            )
        # None disables the comparison. A node that does not take part has no valid
        # number.
        compared = node.num_partitions is not None and self._num_partitions is not None
        if not compared or node.unusable or node.refusal:
            return ""
        if self._num_partitions == 0:  # 0 allows any number: the first node decides
            self._num_partitions = node.num_partitions
            self._said_by = str(node)
        if node.num_partitions == self._num_partitions:
            return ""
        return (
            f"{self._said_by} has num-partitions={self._num_partitions}, but {node} has"
            f" num-partitions={node.num_partitions}: partitions of different splits"
            " share examples. Give all SuperNodes the same number in --node-config."
        )


def _warn_of_versions(node: Node, versions: str) -> None:
    other = differences(versions)
    if other:
        texts = "; ".join(dict(other))
        logger.warning("%s: %s. Install one version everywhere.", node, texts)


def _advise_packing(nodes: Collection[Node]) -> None:
    """Log how many new nodes of a network read each array separately."""
    others = [node for node in nodes if not node.packs]
    if others:
        logger.info(
            "%d of %d nodes do not read arrays in one piece; each array then costs the"
            " server as much as two megabytes. Let the app answer the query"
            " (answer_query), with the mod packed of fedbn_flwr.mods as its first mod.",
            len(others),
            len(nodes),
        )
