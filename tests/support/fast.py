"""The fast suite has these cases of a law. ``make slow`` has the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def fast(cases: Iterable, *kept: Any) -> list:
    """Return the cases for ``parametrize``, with all but those kept marked as slow.

    The arguments ``kept`` are cases, numbers of cases, or the first values of a case,
    joined by hyphens.
    """
    marked = []
    for place, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        name = "-".join([*map(str, values), ""])
        named = name.startswith(tuple(f"{one}-" for one in kept))
        is_fast = case in kept or place in kept or named
        marks = () if is_fast else pytest.mark.slow
        marked.append(pytest.param(*values, marks=marks))
    return marked


def thinned(cases: Iterable, step: int = 3) -> list:
    """Return the cases for ``parametrize``, with all but every third marked as slow."""
    cases = [*cases]
    return fast(cases, *range(0, len(cases), step))
