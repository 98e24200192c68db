"""The SuperLink's list of nodes in Flower's Control API, to register nodes.

Only ``docker/register.py`` imports it. If a new version of Flower changes it,
``tests/compat/test_node_list.py`` names the fault.

In Flower 1.41, ``flwr supernode list`` does not print the SuperLink's names or keys of
nodes. The SuperLink remembers an unregistered key and never accepts it again.
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


def register_exactly(connection: str, keys: Mapping[str, bytes]) -> list[str]:
    """Register these nodes, unregister all others, and return a line for each node.

    Args:
        connection: the SuperLink's name in Flower's config.
        keys: public key (PEM) of each node by name.

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

            # Find registered keys that should not be, even under another name.
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
