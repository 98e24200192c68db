"""Print what extras of a project need: ``extras.py PYPROJECT EXTRA,EXTRA``."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main(pyproject: str, extras: str) -> None:
    """Print the requirements; exit with a message for an unknown extra."""
    project = tomllib.loads(Path(pyproject).read_text())["project"]
    known = project["optional-dependencies"]
    names = [name for name in extras.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(
            f"FEDBN_EXTRAS={extras}: there is no extra {', '.join(unknown)}. Use"
            f" {', '.join(known)}."
        )
    for name in names:
        print(*known[name], sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
