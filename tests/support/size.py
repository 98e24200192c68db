"""The size of code in nodes of its syntax tree.

`python -m tests.support.size` prints it. Lines depend on formatting, and nodes do not.
Contexts such as ``Load`` and the names of operators do not count.
"""

import ast
from pathlib import Path

from tests.support.checkout import ROOT

_SKIPPED = (
    ast.expr_context,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
    ast.arguments,
)


def rooms() -> dict[str, list[Path]]:
    """Return the files of each folder of the package and of the tests, by its name.

    Each folder of the laboratory is a room. Files that are in no folder belong to the
    room above them.
    """
    found = {}
    for tree in ("fedbn_flwr", "tests"):
        for path in sorted((ROOT / tree).rglob("*.py")):
            folders = path.relative_to(ROOT).parent.parts
            depth = 3 if folders[1:2] == ("lab",) else 2
            found.setdefault("/".join(folders[:depth]), []).append(path)
    return found


def nodes(path: Path) -> int:
    """Return the number of nodes of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return sum(not isinstance(node, _SKIPPED) for node in ast.walk(tree))


def sizes() -> dict[str, int]:
    """Return the number of nodes of each room."""
    return {room: sum(map(nodes, files)) for room, files in sorted(rooms().items())}


def totals() -> dict[str, int]:
    """Return the number of nodes of the core, the laboratory and the tests."""
    found = {"core": 0, "laboratory": 0, "tests": 0}
    for room, size in sizes().items():
        if room.startswith("tests"):
            found["tests"] += size
        elif room.startswith("fedbn_flwr/lab"):
            found["laboratory"] += size
        else:
            found["core"] += size
    return found


if __name__ == "__main__":
    for room, size in (sizes() | totals()).items():
        print(f"{size:>8,}  {room}")
