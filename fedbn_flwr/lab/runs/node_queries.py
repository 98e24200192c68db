"""What the server asks the nodes before round 1: their number, and the mean and std of inputs that only they have."""

from __future__ import annotations

import logging
import time
from functools import reduce

import torch
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.errors import ConfigError, DataError, EngineError, raise_shared_config_error
from fedbn_flwr.lab.config import Config
from fedbn_flwr.messages.kinds import of_kind
from fedbn_flwr.messages.protocol import MOMENTS, MOMENTS_QUERY, NodeProperties, ReplyInfo
from fedbn_flwr.messages.records import from_record
from fedbn_flwr.server.nodes import Node
from fedbn_flwr.training.input_scale import FeatureMoments, Scale, scale_of
from fedbn_flwr.transport.polling_grid import ImmediateGrid, over_network

__all__ = ["REPLY_WAIT", "agreed_scale", "count_nodes"]

logger = logging.getLogger("flwr")

NODE_GRACE = 15.0  # seconds to wait for all nodes of a federation
RETURN_GRACE = 60.0  # NODE_GRACE of a resumed run: Flower refuses the key of a killed node for about 44 s
REPLY_WAIT = 3600.0  # seconds to wait for replies over a network, by default


def count_nodes(grid: ImmediateGrid, config: Config, begun_with: int) -> int:
    """Wait for the number of nodes in the config, and return the number of clients of the run.

    Over a network nodes come one after another: ``num_clients`` = 0 is then the number of parts into which they say
    that they split the data. There a resumed run may also continue with fewer nodes, and one of ``num_clients`` = 0
    with more; in other engines this would change the split.

    Raises:
        EngineError: there are no nodes.
        ConfigError: the federation has another size.
    """
    wanted, network = config.num_clients or begun_with, over_network(grid)
    may_differ = begun_with > 0 and network
    grace = RETURN_GRACE if may_differ else NODE_GRACE
    connected = _wait_for_nodes(grid, wanted or 1, grace)
    if not connected:
        raise EngineError(f"no nodes connected within {grace:g} s; start the SuperNodes first")
    if not wanted:
        return _all_nodes(grid, config) if network else connected
    if may_differ and connected < wanted == begun_with:
        logger.warning("the run began with %d nodes and continues with %d: the others may come back", wanted, connected)
    elif may_differ and connected > wanted and not config.num_clients:
        logger.warning("the run began with %d nodes and continues with %d", wanted, connected)
    elif connected != wanted:
        start = f"In simulation add --federation-config 'num-supernodes={wanted}' to `flwr run`"
        if network:
            start = f"Start {wanted} SuperNodes"
        why = f"the run began with {begun_with}" if begun_with else "or set num-clients=0 to take all nodes"
        raise ConfigError(f"num-clients={wanted}, but the federation has {connected} node(s). {start}; {why}.")
    return wanted


def _wait_for_nodes(grid: Grid, at_least: int, grace: float) -> int:
    """Return how many nodes are connected once there are enough, at the latest after ``grace`` seconds."""
    deadline = time.monotonic() + grace
    while (connected := len(list(grid.get_node_ids()))) < at_least and time.monotonic() <= deadline:
        time.sleep(0.2)
    return connected


def _all_nodes(grid: ImmediateGrid, config: Config) -> int:
    """Return the number of nodes with the data: at least that of the parts of which the first to answer has one."""
    messages = [Message(RecordDict(), node_id, MessageType.QUERY) for node_id in grid.get_node_ids()]
    replies = grid.send_and_receive_until(
        messages,
        lambda replies: any(reply.has_content() for reply in replies),
        timeout=config.round_timeout or REPLY_WAIT,
    )
    answers = [NodeProperties.read(reply).num_partitions or 0 for reply in replies if reply.has_content()]
    parts = max(answers, default=0)
    connected = _wait_for_nodes(grid, parts, NODE_GRACE)
    if connected < parts:
        logger.warning("num-partitions=%d, and the run begins with %d node(s): the others may join", parts, connected)
    return max(connected, parts)


def agreed_scale(grid: Grid, config: Config, timeout: float) -> Scale:
    """Ask all nodes for the sums of their training inputs, and return the mean and std of all of them together.

    The sums are merged in the order of partition ids, so that the result has the bits of a run that has all data. A
    node that does not answer in ``timeout`` seconds, or has no usable data, has no part in them: the log names it.

    Raises:
        ConfigError: no node has answered with its sums, or all nodes raised this error.
    """
    problems = {node_id: (Node(node_id), "no answer") for node_id in grid.get_node_ids()}
    messages = [Message(RecordDict(), node_id, MOMENTS_QUERY) for node_id in problems]
    received: list[tuple[Node, FeatureMoments]] = []
    errors: list[str] = []
    for reply in grid.send_and_receive(messages, timeout=timeout):
        node_id = reply.metadata.src_node_id
        node = Node(node_id, ReplyInfo.read(reply).partition_id)
        if reply.has_error():
            errors.append(str(reply.error.reason))
            problems[node_id] = node, errors[-1]
            continue
        try:
            received.append((node, _moments(reply, config.example_shape()[0])))
            del problems[node_id]
        except DataError as error:
            problems[node_id] = node, str(error)
    raise_shared_config_error(errors, len(messages))
    if not received:
        node, why = next(iter(problems.values()))
        raise ConfigError(
            f"standardise=federated needs the sums of the inputs of the nodes, and no node has sent them; {node}: {why}"
        )
    for node, why in problems.values():
        logger.warning("%s has no part in the mean and std of the inputs: %s", node, why)
    received.sort(key=lambda pair: pair[0].order)
    return scale_of(reduce(FeatureMoments.merged, [moments for _, moments in received]))


def _moments(reply: Message, channels: int) -> FeatureMoments:
    """Return the sums in a reply.

    Raises:
        DataError: it has none, or they cannot be sums of inputs with so many features.
    """
    if unusable := NodeProperties.read(reply).unusable:
        raise DataError(unusable)
    sent = from_record(of_kind(reply.content, ArrayRecord).get(MOMENTS, ArrayRecord()))
    values = {name: torch.from_numpy(array).double() for name, array in sent.items()}
    known = values.keys() == FeatureMoments.__dataclass_fields__.keys()
    if not known or any(v.shape != (channels,) or not v.isfinite().all() for v in values.values()):
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in values.items())
        raise DataError(f"it sent {shapes or 'no sums'}; finite count, mean and m2 of {channels} features needed")
    moments = FeatureMoments(**values)
    if (moments.count < 0).any() or (moments.m2 < 0).any():
        raise DataError("it sent a count or a sum of squares below 0")
    return moments
