"""Tell a SuperLink the public keys of its nodes: ``register.py CONNECTION FOLDER``.

The folder is the whole list: a node whose key is not in it any more is unregistered.
"""

from __future__ import annotations

import sys
from pathlib import Path

from click import ClickException
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_public_key,
)

from fedbn_flwr.compat.node_list import register_exactly


def main(connection: str, folder: str) -> None:
    """Register each ``*.pub`` of the folder by its name, and no other node."""
    keys = {}
    for path in sorted(Path(folder).glob("*.pub")):
        key = load_ssh_public_key(path.read_bytes())
        form = PublicFormat.SubjectPublicKeyInfo
        keys[path.stem] = key.public_bytes(Encoding.PEM, form)
    if not keys:
        sys.exit(f"{folder} has no *.pub: that would unregister all nodes")
    try:
        print(*register_exactly(connection, keys), sep="\n")
    except ClickException as error:
        sys.exit(error.format_message())


if __name__ == "__main__":
    main(*sys.argv[1:])
