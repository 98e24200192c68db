"""What registering nodes takes from Flower's Control API: the SuperLink's list of them.

``docker/register.py`` alone imports it. ``tests/compat/test_node_list.py`` says what
broke when a new version of Flower changes it.

Read in Flower 1.41: ``flwr supernode list`` prints neither the names nor the keys that
the SuperLink has. A key that was unregistered stays known, and is never taken again.
"""

from __future__ import annotations

from collections.abc import Mapping

from flwr.cli.flower_config import read_superlink_connection
from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.constant import NodeStatus

__all__ = ["register_exactly"]


def register_exactly(connection: str, keys: Mapping[str, bytes]) -> list[str]:
    """Register these nodes, unregister all others, and say what was done of each.

    Args:
        connection: the SuperLink's name in Flower's config.
        keys: name to public key (PEM) of each node.

    Raises:
        click.ClickException: the SuperLink does not answer, or refuses a key.
    """
    client = init_http_client_from_connection(read_superlink_connection(connection))
    lines = []
    try:
        with flwr_cli_exc_handler():
            known = {}
            for node in client.ListNodes(ListNodesRequest()).nodes_info:
                known[node.public_key] = node

            # Those that are registered, and shall not be; also by another name.
            wanted = set(keys.values())
            for key, node in known.items():
                if key not in wanted and node.status != NodeStatus.UNREGISTERED:
                    client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
                    lines.append(f"{node.name}: unregistered, node {node.node_id}")

            for name, key in keys.items():
                if key not in known:
                    asked = RegisterNodeRequest(public_key=key, name=name)
                    node_id = client.RegisterNode(asked).node_id
                    lines.append(f"{name}: registered, node {node_id}")
                elif known[key].status == NodeStatus.UNREGISTERED:
                    lines.append(f"{name}: refused, its key was unregistered once")
                else:
                    node = known[key]
                    lines.append(f"{name}: {node.status}, node {node.node_id}")
    finally:
        client.close()
    return lines
