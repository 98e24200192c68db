"""What the server asks the nodes before round 1: their number."""

from __future__ import annotations

import logging
import time

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.errors import ConfigError, EngineError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.messages.protocol import NodeProperties
from fedbn_flwr.transport.polling_grid import ImmediateGrid, over_network

__all__ = ["REPLY_WAIT", "count_nodes"]

logger = logging.getLogger("flwr")

NODE_GRACE = 15.0  # seconds to wait for all nodes of a federation
# NODE_GRACE of a resumed run: Flower refuses the key of a killed node for about 44 s
RETURN_GRACE = 60.0
REPLY_WAIT = 3600.0  # seconds to wait for replies over a network, by default


def count_nodes(grid: ImmediateGrid, config: Config, begun_with: int) -> int:
    """Wait for the number of nodes in the config, and return the number of clients of
    the run.

    Over a network nodes come one after another: ``num_clients`` = 0 is then the number
    of parts into which they say that they split the data. There a resumed run may also
    continue with fewer nodes, and one of ``num_clients`` = 0 with more; in other
    engines this would change the split.

    Raises:
        EngineError: there are no nodes.
        ConfigError: the federation has another size.
    """
    wanted = config.num_clients or begun_with
    network = over_network(grid)
    may_differ = begun_with > 0 and network

    # wait for the nodes
    grace = RETURN_GRACE if may_differ else NODE_GRACE
    connected = _wait_for_nodes(grid, wanted or 1, grace)
    if not connected:
        raise EngineError(
            f"no nodes connected within {grace:g} s; start the SuperNodes first"
        )

    # a new run of any size
    if not wanted:
        return _all_nodes(grid, config) if network else connected

    # a known size, from which a resumed run over a network may differ
    if may_differ and connected < wanted == begun_with:
        logger.warning(
            "the run began with %d nodes and continues with %d: the others may come"
            " back",
            wanted,
            connected,
        )
    elif may_differ and connected > wanted and not config.num_clients:
        logger.warning(
            "the run began with %d nodes and continues with %d", wanted, connected
        )
    elif connected != wanted:
        start = (
            f"In simulation add --federation-config 'num-supernodes={wanted}' to `flwr"
            " run`"
        )
        if network:
            start = f"Start {wanted} SuperNodes"
        why = "or set num-clients=0 to take all nodes"
        if begun_with:
            why = f"the run began with {begun_with}"
        raise ConfigError(
            f"num-clients={wanted}, but the federation has {connected} node(s)."
            f" {start}; {why}."
        )
    return wanted


def _wait_for_nodes(grid: Grid, at_least: int, grace: float) -> int:
    """Return how many nodes are connected once there are enough.

    Args:
        grid: the federation.
        at_least: how many are enough.
        grace: seconds to wait for them at the most.
    """
    deadline = time.monotonic() + grace
    connected = len(list(grid.get_node_ids()))
    while connected < at_least and time.monotonic() <= deadline:
        time.sleep(0.2)
        connected = len(list(grid.get_node_ids()))
    return connected


def _all_nodes(grid: ImmediateGrid, config: Config) -> int:
    """Return the number of nodes: at least that of the parts of the data.

    Each node with one of the parts knows how many there are: one answer is enough.
    """
    # ask all, and go on with the first answer
    messages = []
    for node_id in grid.get_node_ids():
        messages.append(Message(RecordDict(), node_id, MessageType.QUERY))
    replies = grid.send_and_receive_until(
        messages,
        lambda replies: any(reply.has_content() for reply in replies),
        timeout=config.round_timeout or REPLY_WAIT,
    )
    parts = 0
    for reply in replies:
        if reply.has_content():
            parts = max(parts, NodeProperties.read(reply).num_partitions or 0)

    # the nodes with the other parts may still be on their way
    connected = _wait_for_nodes(grid, parts, NODE_GRACE)
    if connected < parts:
        logger.warning(
            "num-partitions=%d, and the run begins with %d node(s): the others may"
            " join",
            parts,
            connected,
        )
    return max(connected, parts)
