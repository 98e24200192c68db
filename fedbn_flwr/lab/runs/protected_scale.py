"""One mean and std of the inputs of all nodes under masks or noise, before round 1: ``privacy.input_sums``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedbn_flwr.batchnorm.averaging import Array
from fedbn_flwr.errors import ConfigError, MaskingError, ReplyError, raise_shared_config_error
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.files import read_json
from fedbn_flwr.lab.output.folder import RunFolder
from fedbn_flwr.messages.kinds import of_kind
from fedbn_flwr.messages.protocol import (
    BY_CLIENT,
    INPUT_HIGH,
    INPUT_LOW,
    INPUT_SUMS,
    MASKED,
    MOMENTS,
    MOMENTS_QUERY,
    SERVER_ROUND,
    NodeProperties,
)
from fedbn_flwr.messages.records import from_record
from fedbn_flwr.privacy.input_sums import noisy_scale, norm_bound, scale_of_sums
from fedbn_flwr.privacy.masked_round import MaskedRound
from fedbn_flwr.privacy.noise import Noise, SystemNoise
from fedbn_flwr.server.nodes import Node
from fedbn_flwr.server.protection import Protection
from fedbn_flwr.server.report import RoundReport
from fedbn_flwr.training.input_scale import FeatureRanges, Scale
from fedbn_flwr.transport.polling_grid import polling

__all__ = ["protected_scale"]

logger = logging.getLogger("flwr")

_QUERY = "config"  # the record of a query
_BEFORE_ROUND_1 = 0
_OPENED = "scale-clients.json"  # in the run's folder: whose masked sums are opened


def protected_scale(
    grid: Grid,
    config: Config,
    timeout: float,
    protection: Protection,
    folder: RunFolder,
    noise: Noise | None = None,
) -> Scale:
    """Ask all nodes for bounded sums of their training inputs; return the mean and std of all of them together.

    Masked sums need all clients that agreed on masks up to the threshold; the other ways use the sums that come. A run
    that was killed before it had the result asks again: noisy sums are counted twice, and masked ones are opened if
    they are those of the same clients, which tell nothing new.

    Args:
        grid: the nodes.
        config: the settings of the run, with ``feature_ranges``.
        timeout: seconds to wait for replies.
        protection: of the run; it counts the release of noisy sums.
        folder: of the run; it keeps whose masked sums are opened.
        noise: the source of the noise that the server adds; None = the operating system's entropy.

    Raises:
        ConfigError: no node has answered with its sums, all nodes raised this error, the masks cannot be removed, or
            the noise would cost more than the run may; or other clients answer than before the run was killed.
    """
    ranges = config.ranges()
    if ranges is None:
        raise ConfigError("standardise=federated with privacy needs feature-ranges")
    by_client, z = config.dp != "off" and not config.record_dp, config.standardise_noise_multiplier
    nodes = _nodes(grid, timeout)
    if by_client or config.record_dp:
        protection.release_inputs(z, len(nodes))
    asked: dict[str, Any] = {INPUT_LOW: [*ranges.low], INPUT_HIGH: [*ranges.high], BY_CLIENT: by_client}
    if config.masked_sums:
        total, clients = _masked(grid, config, timeout, nodes, {**asked, **protection.config()}, by_client, folder)
    else:
        answers = _ask(grid, timeout, dict.fromkeys(range(len(nodes)), asked), nodes)
        sums = {number: _sums(state, len(ranges.low)) for number, state in answers.items()}
        if not sums:
            raise ConfigError(
                "standardise=federated needs the sums of the inputs of the nodes, and no node has sent them"
            )
        total, clients = torch.stack([sums[number] for number in sorted(sums)]).sum(0), len(sums)
    return _scale(total, clients, ranges, config, by_client, noise or SystemNoise())


def _scale(total: Tensor, clients: int, ranges: FeatureRanges, config: Config, by_client: bool, noise: Noise) -> Scale:
    """Return mean and std from the sums of so many clients; the server's noise is added to those of clients."""
    if not (by_client or config.record_dp):
        return scale_of_sums(total, ranges)
    deviation = config.standardise_noise_multiplier * norm_bound(len(ranges.low))
    if by_client:
        total = total + deviation * torch.from_numpy(noise.normal(tuple(total.shape)))
    else:
        deviation *= clients**0.5  # each client has added its own
    scale, by_range = noisy_scale(total, deviation, ranges)
    if by_range:
        names = config.data_info().feature_names or tuple(map(str, range(len(ranges.low))))
        logger.warning(
            "the noise is larger than the sums of %d features, which have the middle and deviation of their ranges: %s",
            len(by_range),
            ", ".join(names[at] for at in by_range),
        )
    return scale


def _nodes(grid: Grid, timeout: float) -> list[Node]:
    """Return all nodes in the order of partition ids, with the number of their examples."""
    found = {node_id: Node(node_id) for node_id in grid.get_node_ids()}
    messages = [Message(RecordDict(), node_id, MessageType.QUERY) for node_id in found]
    for reply in grid.send_and_receive(messages, timeout=timeout):
        if not reply.has_error():
            said, node_id = NodeProperties.read(reply), reply.metadata.src_node_id
            found[node_id] = Node(node_id, said.partition_id, said.num_examples)
    return sorted(found.values(), key=lambda node: node.order)


def _masked(
    grid: Grid,
    config: Config,
    timeout: float,
    nodes: list[Node],
    asked: Mapping[str, Any],
    by_client: bool,
    folder: RunFolder,
) -> tuple[Tensor, int]:
    """Return the sum of what the clients have masked, and how many are in it; values are at most 1 in size."""
    opened = read_json(folder.path / _OPENED)["clients"] if (folder.path / _OPENED).is_file() else None
    masks = MaskedRound(RoundReport(_BEFORE_ROUND_1, "inputs"), nodes, polling(grid), timeout, 1.0, by_client)
    able = [n for n, node in enumerate(nodes) if node.num_examples and (opened is None or node.label in opened)]
    if not masks.prepare(able, config.masked_threshold, config.masked_neighbours):
        raise ConfigError(f"standardise=federated: {len(masks.present)} of {len(nodes)} clients agreed on masks")
    common = {**asked, SERVER_ROUND: _BEFORE_ROUND_1}
    answers = _ask(grid, timeout, {n: {**common, **masks.config(n)} for n in sorted(masks.present)}, nodes)
    size = 3 * len(asked[INPUT_LOW])
    vectors = {
        number: state[MASKED]
        for number, state in answers.items()
        if {*state} == {MASKED} and state[MASKED].shape == (size,) and state[MASKED].dtype == np.int64
    }
    try:
        if not vectors:
            raise MaskingError("no client has sent its masked sums")
        if masks.enough(frozenset(vectors)):  # else nothing is opened
            _open({nodes[number].label: nodes[number].num_examples for number in vectors}, opened, folder)
        mean = masks.mean(vectors)
    except (MaskingError, ReplyError) as error:
        raise ConfigError(f"standardise=federated: the masks of the sums cannot be removed: {error}") from error
    return torch.from_numpy(mean * masks.weight(vectors.keys())).reshape(3, -1), len(vectors)


def _open(answered: Mapping[str, int | None], opened: Mapping[str, int] | None, folder: RunFolder) -> None:
    """Note whose masked sums are opened, with their numbers of examples, before they are.

    The sums hold no noise, and no new batches as those of a round: with other clients than in the sum that is known
    already, the difference of the two would be the sums of single clients.

    Raises:
        ConfigError: the run was killed after it had opened those of other clients, or of other numbers of examples.
    """
    if opened is None:
        folder.save(_OPENED, {"clients": answered})
    elif answered != opened:
        raise ConfigError(
            "standardise=federated: before this run was killed, the sums of the inputs of partitions "
            f"{', '.join(opened)} were asked for, and now {', '.join(answered)} have answered, or with other numbers "
            "of examples. The difference would tell the sums of single clients, so nothing is opened. Resume when the "
            "same nodes are there, or begin a run with standardise=ranges or local."
        )


def _ask(
    grid: Grid, timeout: float, configs: Mapping[int, Mapping[str, Any]], nodes: list[Node]
) -> dict[int, Mapping[str, Array]]:
    """Return what the nodes answer, by their number; the log names those that do not.

    Raises:
        ConfigError: all nodes raised this error.
    """
    messages = []
    for number, config in configs.items():
        content = RecordDict({_QUERY: ConfigRecord({str(key): value for key, value in config.items() if value != []})})
        messages.append(Message(content, nodes[number].node_id, MOMENTS_QUERY))
    number_of = {node.node_id: number for number, node in enumerate(nodes)}
    answers: dict[int, Mapping[str, Array]] = {}
    why = dict.fromkeys(configs, "no answer")
    errors: list[str] = []
    for reply in _received(grid, messages, timeout):
        number = number_of[reply.metadata.src_node_id]
        if reply.has_error():
            why[number] = str(reply.error.reason)
            errors.append(why[number])
            continue
        if unusable := NodeProperties.read(reply).unusable:
            why[number] = unusable
            continue
        answers[number] = from_record(of_kind(reply.content, ArrayRecord).get(MOMENTS, ArrayRecord()))
        del why[number]
    raise_shared_config_error(errors, len(messages))
    for number, text in why.items():
        logger.warning("%s has no part in the mean and std of the inputs: %s", nodes[number], text)
    return answers


def _received(grid: Grid, messages: list[Message], timeout: float) -> Iterable[Message]:
    return grid.send_and_receive(messages, timeout=timeout)


def _sums(state: Mapping[str, Array], features: int) -> Tensor:
    """Return the bounded sums in an answer.

    Raises:
        ConfigError: they are no sums of so many features.
    """
    sums = state.get(INPUT_SUMS)
    if sums is None or sums.shape != (3, features) or not np.isfinite(sums).all():
        raise ConfigError(f"standardise=federated: a node has sent no finite sums (3, {features}) of its inputs")
    return torch.from_numpy(sums).double()
