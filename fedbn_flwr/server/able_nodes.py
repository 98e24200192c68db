"""Which nodes can train in a round, and why the others cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedbn_flwr.errors import ClientPartError, ConfigError
from fedbn_flwr.server.failures import MOD_ORDER
from fedbn_flwr.server.nodes import Node
from fedbn_flwr.server.report import RoundReport

__all__ = ["able_to_train"]


def able_to_train(
    present: Sequence[Node], silent: Mapping[int, str], keeps_parts: bool, report: RoundReport
) -> list[Node]:
    """Return the nodes that have training data and whose reply can be used; report those that cannot take part.

    Args:
        present: the nodes that have said who they are.
        silent: node id to the reason why a node has not.
        keeps_parts: whether parts of the model stay with the clients. A mod before ``local_bn`` would refuse every
            reply, which lacks their entries.
        report: the report of the round.

    Raises:
        ConfigError: no node can train.
        ClientPartError: a mod would refuse the replies of all nodes.
    """
    for node in present:
        if node.unusable:
            report.reject(node.node_id, f"{node}: {node.unusable}")
    if present and all(node.unusable for node in present):
        raise ConfigError(f"no node can train; {present[0]}: {present[0].unusable}")
    for node_id, why in silent.items():
        report.reject(node_id, f"node {node_id} did not say who it is: {why}")
    able = [node for node in present if node.num_examples != 0]
    if not keeps_parts:
        return able
    blocked = {node.node_id: f"{node}: {node.refusal} {MOD_ORDER}." for node in able if node.behind_mod}
    for node_id, why in blocked.items():
        report.reject(node_id, why)
    if blocked and len(blocked) == len(able):
        raise ClientPartError(why)
    return [node for node in able if not node.behind_mod]
