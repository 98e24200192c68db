"""``docker-compose.yml`` and its overrides for more nodes (``make compose NODES=5``).

The new files repeat the part of node 1 for each node.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError

_FIRST, _SECOND, _VOLUMES = "  supernode-1:\n", "  supernode-2:\n", "\nvolumes:\n"
_NETWORKS = "networks:\n"
_ELSEWHERE = "".join(
    f"  {name}:\n    profiles: !override [elsewhere]\n"
    for name in ("supernode-1", "superexec-clientapp-1", "superexec-clientapp-1-gpu")
)


def files_for_nodes(root: Path, num_nodes: int) -> dict[Path, str]:
    """Return the compose file and its overrides for ``num_nodes`` nodes, by path.

    Each node has an override for its own machine. The override of the server's machine
    leaves out all nodes.

    Args:
        root: the folder of ``docker-compose.yml`` and ``docker``.
        num_nodes: the number of nodes, 2 or more.

    Raises:
        ConfigError: there are fewer than two nodes, or a file cannot be read or lacks
            the part of node 1.
    """
    if num_nodes < 2:
        raise ConfigError(f"num_nodes={num_nodes}: a federation needs 2 nodes or more")
    compose, docker = root / "docker-compose.yml", root / "docker"
    numbers = range(1, num_nodes + 1)

    # Write the services: first the text above node 1's services, then a copy of node
    # 1's services for each node.
    services, rest = _split(compose, _VOLUMES)
    above, nodes = _split(compose, _FIRST, services)
    first, _ = _split(compose, _SECOND, _FIRST + nodes)
    copies = [_of_node(first.rstrip("\n"), n, num_nodes) for n in numbers]

    # Write the volumes: first the user's own volumes, then the nodes' volumes. The
    # section of volumes ends before the next line that begins in the first column.
    next_section = re.search(r"(?m)^[^ \n]", rest)
    end = next_section.start() if next_section else len(rest)
    volumes = ""
    for line in rest[:end].splitlines(keepends=True):
        if line.strip() and not re.search(r"-\d+-state:$", line):
            volumes += line
    for n in numbers:
        volumes += f"  supernode-{n}-state:\n  clientapp-{n}-state:\n"

    # Write a network for each node, so that a node reaches no other node.
    networks = "".join(f"  node-{n}: {{ internal: true }}\n" for n in numbers)
    below = re.sub(r"(?m)^  node-\d+:.*\n", "", rest[end:])
    below = below.replace(_NETWORKS, _NETWORKS + networks)
    if below:
        below = "\n" + below
    whole = above + "\n\n".join(copies) + "\n" + _VOLUMES + volumes + below
    files = {compose: whole}

    # Write the overrides for the machines: the server's machine leaves out all nodes,
    # and each node's machine leaves out all other nodes.
    here, _ = _split(docker / "machine-server.yml", _FIRST)
    files[docker / "machine-server.yml"] = here + _elsewhere(numbers)
    alone, _ = _split(docker / "machine-node-1.yml", _SECOND)
    for n in numbers:
        others = _elsewhere(k for k in numbers if k != n)
        files[docker / f"machine-node-{n}.yml"] = _of_node(alone, n, num_nodes) + others
    return files


def write_for_nodes(root: Path, num_nodes: int) -> list[str]:
    """Write ``files_for_nodes``, and return a line for each changed file.

    Overrides of nodes above ``num_nodes`` are removed. Manual changes in the parts of
    nodes 2 and up are lost; manual changes in the part of node 1 go to all nodes.

    Raises:
        ConfigError: as ``files_for_nodes``; nothing is written then.
    """
    files = files_for_nodes(root, num_nodes)
    lines = []
    for path, text in files.items():
        if not path.is_file() or path.read_text() != text:
            write_atomically(path, text)
            lines.append(f"written: {path}")
    for path in sorted((root / "docker").glob("machine-node-*.yml")):
        if re.fullmatch(r"machine-node-\d+\.yml", path.name) and path not in files:
            path.unlink()
            lines.append(f"removed: {path}")
    return lines


def _of_node(text: str, number: int, num_nodes: int) -> str:
    """Return node 1's part of a file, adapted to another node."""
    text = _renumbered(text, number).replace("# Node 1 ", f"# Node {number} ")
    text = text.replace("partition-id=0", f"partition-id={number - 1}")
    return re.sub(r"(?<=num-partitions=)\d+", str(num_nodes), text)


def _renumbered(text: str, number: int) -> str:
    """Return a text about node 1 with the names of another node instead."""
    text = re.sub(r"(supernode|clientapp|node)-1\b", rf"\1-{number}", text)
    return text.replace("NODE_1_", f"NODE_{number}_")


def _elsewhere(numbers: Iterable[int]) -> str:
    """Return the lines of an override that leave out the services of these nodes."""
    return "".join(_renumbered(_ELSEWHERE, n) for n in numbers)


def _split(path: Path, mark: str, text: str | None = None) -> tuple[str, str]:
    """Return the text before and after ``mark``, in ``text`` or else in the file.

    Raises:
        ConfigError: the file cannot be read, or the text has no ``mark``.
    """
    if text is None:
        try:
            text = path.read_text()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
    before, has_mark, after = text.partition(mark)
    if not has_mark:
        raise ConfigError(
            f"{path} has no {mark.strip()!r}, so it is not the compose file of a"
            " checkout"
        )
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="make compose", description="docker-compose.yml for its nodes"
    )
    parser.add_argument("--nodes", type=int, default=3, help="number of nodes")
    try:
        changed = write_for_nodes(Path(), parser.parse_args().nodes)
    except ConfigError as error:
        parser.exit(1, f"{error}\n")
    print("\n".join(changed) or "nothing to change")
