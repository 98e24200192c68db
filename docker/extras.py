"""Print what extras of a project need, a requirement a line:
``extras.py PYPROJECT EXTRA,EXTRA``.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main(pyproject: str, extras: str) -> None:
    """Print the requirements; exit with a message where the project has no such extra."""
    known = tomllib.loads(Path(pyproject).read_text())["project"][
        "optional-dependencies"
    ]
    names = [name for name in extras.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        sys.exit(
            f"FEDBN_EXTRAS={extras}: no extra {', '.join(unknown)}; there are {', '.join(known)}"
        )
    for name in names:
        print(*known[name], sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
