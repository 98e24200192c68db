"""Mean and standard deviation of inputs that only the nodes have: each node sends its sums, once, before round 1."""

from __future__ import annotations

import logging
from functools import reduce

import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.errors import ConfigError, DataError, raise_shared_config_error
from fedbn_flwr.lab.config import Config
from fedbn_flwr.messages.protocol import MOMENTS, MOMENTS_QUERY, NodeProperties, ReplyInfo
from fedbn_flwr.messages.records import from_record
from fedbn_flwr.server.nodes import Node
from fedbn_flwr.training.input_scale import FeatureMoments, Scale, scale_of

__all__ = ["agreed_scale"]

logger = logging.getLogger("flwr")


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
    sent = from_record(reply.content.array_records.get(MOMENTS, ArrayRecord()))
    values = {name: torch.from_numpy(array).double() for name, array in sent.items()}
    known = values.keys() == FeatureMoments.__dataclass_fields__.keys()
    if not known or any(v.shape != (channels,) or not v.isfinite().all() for v in values.values()):
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in values.items())
        raise DataError(f"it sent {shapes or 'no sums'}; finite count, mean and m2 of {channels} features needed")
    moments = FeatureMoments(**values)
    if (moments.count < 0).any() or (moments.m2 < 0).any():
        raise DataError("it sent a count or a sum of squares below 0")
    return moments
