"""What a diff of a project changes."""

from __future__ import annotations

from pathlib import Path


def changed_lines(diff: Path) -> tuple[list[str], list[str]]:
    """Return the lines that a diff removes, and those that it adds without blank lines
    and docstrings; stripped.
    """
    lines = diff.read_text().splitlines()
    old, new = (
        [
            x[1:].strip()
            for x in lines
            if x.startswith(sign) and not x.startswith(3 * sign)
        ]
        for sign in "-+"
    )
    return old, [line for line in new if line and not line.startswith('"""')]
