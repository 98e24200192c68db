"""Tell a SuperLink the public keys of its nodes: ``register.py CONNECTION FOLDER``.

The folder is the complete list: a node whose key is no longer in it is unregistered.

The list of nodes comes from Flower's Control API. In Flower 1.41, ``flwr supernode
list`` does not print the SuperLink's names or keys of nodes. The SuperLink remembers an
unregistered key and never accepts it again. If a new version of Flower changes the API,
``tests/lab/deployment/test_register.py`` names the fault.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from click import ClickException
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_public_key,
)
from flwr.cli.flower_config import read_superlink_connection
from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.constant import NodeStatus

from apps.flower_processes import why_not_reached


def main(connection: str, folder: str) -> None:
    """Register each ``*.pub`` of the folder by its name, and no other node."""
    keys = {}
    for path in sorted(Path(folder).glob("*.pub")):
        key = load_ssh_public_key(path.read_bytes())
        form = PublicFormat.SubjectPublicKeyInfo
        keys[path.stem] = key.public_bytes(Encoding.PEM, form)
    if not keys:
        sys.exit(
            f"{folder} has no *.pub file, so all nodes would be unregistered. Name the folder"
            " with the public keys of the nodes."
        )
    try:
        print(*register_exactly(connection, keys), sep="\n")
    except ClickException as error:
        sys.exit(f"{error.format_message()}\n{why_not_reached(connection)}")


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

            # Unregister each key that is not in the folder, under whatever name it is
            # registered.
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
                    lines.append(
                        f"{name}: refused, because its key was unregistered before; make a new key"
                    )
                else:
                    node = known[key]
                    lines.append(f"{name}: {node.status}, node {node.node_id}")
    finally:
        client.close()
    return lines


if __name__ == "__main__":
    main(*sys.argv[1:])
