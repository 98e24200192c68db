"""Lists of cases of which the suite runs a few, and ``make slow`` the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a test, with the mark ``slow`` on all but the quick ones.

    A tuple has the values of several arguments.
    """
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marks = () if case in quick else pytest.mark.slow
        found.append(pytest.param(*values, marks=marks))
    return found
