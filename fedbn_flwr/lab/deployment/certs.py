"""The command of ``make certs``, with only Python and ``cryptography``.

In addition to the keys, it writes the owner of the keys into ``.env`` for
``docker-compose.yml``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from fedbn_flwr.atomic_file import write_atomically
from fedbn_flwr.errors import FedBNError
from fedbn_flwr.lab.deployment.certificates import add_node, make_certificates, renew

_ORDINARY = 1000  # user id of the containers if root makes the keys; needs no account


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the keys and certificates, and write ``.env``.

    With ``--add``, make the keys of one more node. With ``--renew``, make new
    certificates.

    Raises:
        SystemExit: the folder is not empty, or lacks necessary files, or a number is
            out of range; nothing is written then.
    """
    parser = argparse.ArgumentParser(
        prog="make certs", description="keys and certificates"
    )
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path("certs"),
        help="a new folder, or with --add or --renew the folder in use",
    )
    parser.add_argument(
        "--nodes", type=int, default=3, help="number of nodes with keys"
    )
    later = parser.add_mutually_exclusive_group()
    later.add_argument(
        "--add", type=int, metavar="N", help="make keys of one more node"
    )
    later.add_argument(
        "--renew",
        action="store_true",
        help="make new certificates for the same keys; --hosts sets other names",
    )
    parser.add_argument(
        "--hosts",
        default="",
        help="comma list of names and addresses by which nodes reach the server",
    )
    parser.add_argument(
        "--days", type=int, default=365, help="days until the certificates expire"
    )
    parser.add_argument(
        "--env",
        type=Path,
        default=Path(".env"),
        help="file for the variables of docker-compose.yml",
    )
    given = parser.parse_args(arguments)
    hosts = [host for host in given.hosts.split(",") if host]
    folder = given.folder
    done = f"a folder for each role. Keep {folder}/ca secret"
    try:
        if given.add is not None:
            add_node(folder, given.add, given.days)
            done = f"node-{given.add}, clientapp-{given.add} and cli have new files"
        elif given.renew:
            renewed = renew(folder, hosts, given.days)
            done = f"{len(renewed)} certificates, valid for {given.days} days"
        else:
            make_certificates(folder, given.nodes, hosts, given.days)
    except FedBNError as error:
        parser.exit(1, f"{error}\n")

    # The containers run as the owner of the keys, because nobody else can read the
    # keys.
    user, group = _give_to_containers(folder)
    variables = {"FEDBN_UID": str(user), "FEDBN_GID": str(group)}
    variables["COMPOSE_PROFILES"] = "cpu"
    added = add_variables(given.env, variables)
    print(f"{folder}: {done}.")
    print(f"{given.env}: {', '.join(added) or 'nothing to add'}")


def add_variables(path: Path, variables: dict[str, str]) -> list[str]:
    """Add the variables that an ``.env`` file lacks, and return their names."""
    text = path.read_text() if path.is_file() else ""
    present = set()
    for line in text.splitlines():
        present.add(line.partition("=")[0].removeprefix("export ").strip())
    # Keep all existing lines, even a last line without a line break.
    if text and not text.endswith("\n"):
        text += "\n"
    added = []
    for name, value in variables.items():
        if name not in present:
            added.append(name)
            text += f"{name}={value}\n"
    if added:
        write_atomically(path, text)
    return added


def _give_to_containers(folder: Path) -> tuple[int, int]:
    """Return the user and the group that own the keys and run the containers.

    If root made the keys, give all keys except the CA's to an ordinary user.
    """
    user, group = os.getuid(), os.getgid()
    if user:
        return user, group
    # Root makes the keys, but containers never run as root. Give all keys, except the
    # CA's, to an ordinary user.
    for role in folder.iterdir():
        if role.name != "ca":
            for path in (role, *role.iterdir()):
                os.chown(path, _ORDINARY, _ORDINARY)
    return _ORDINARY, _ORDINARY


if __name__ == "__main__":
    main()
