"""The lines that a diff of a project changes."""

from __future__ import annotations

from pathlib import Path


def changed_lines(diff: Path) -> tuple[list[str], list[str]]:
    """Return the stripped lines that a diff removes and adds.

    Added lines exclude blank lines and docstrings.
    """
    removed, added = [], []
    for line in diff.read_text().splitlines():
        if line.startswith(("---", "+++")):  # the names of the files
            continue
        text = line[1:].strip()
        if line.startswith("-"):
            removed.append(text)
        elif line.startswith("+") and text and not text.startswith('"""'):
            added.append(text)
    return removed, added
