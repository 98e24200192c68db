"""Paths and globs of layers and entries, as in the settings layers and personal."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

__all__ = ["is_at", "listed", "near"]


def is_at(path: str, pattern: str) -> bool:
    """Return whether a layer or entry has this path or glob, or is below it."""
    # A name may have brackets, which a glob reads as a set of characters.
    named = f"{path}.".startswith(f"{pattern}.")
    return named or fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")


def listed(patterns: str | Sequence[str]) -> list[str]:
    """Return the patterns, split at commas, without empty patterns."""
    each = patterns.split(",") if isinstance(patterns, str) else patterns
    return [pattern.strip() for pattern in each if pattern.strip()]


def near(pattern: str, paths: Sequence[str]) -> str:
    """Return a sentence with known paths that are similar to the pattern.

    If no path is similar, the sentence has the first paths. The paths of the modules
    above are also candidates.
    """
    known = dict.fromkeys(
        path.rsplit(".", count)[0] for path in paths for count in range(3)
    )
    similar = difflib.get_close_matches(pattern, list(known), n=3) or paths[:3]
    return f"Near: {', '.join(repr(path) for path in similar) or 'none'}."
