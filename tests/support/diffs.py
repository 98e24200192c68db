"""What a diff of a project changes."""

from __future__ import annotations

from pathlib import Path


def changed_lines(diff: Path) -> tuple[list[str], list[str]]:
    """Return the lines that a diff removes, and those that it adds without blank lines
    and docstrings; stripped.
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
