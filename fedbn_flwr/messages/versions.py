"""The versions of this package, torch and Flower, which a node and its server compare
before round 1.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib import metadata

__all__ = ["COMPARED", "as_text", "differences", "own_versions"]

COMPARED = ("fedbn-flwr", "torch", "flwr")
_LONGEST = 500  # characters that are read of what another machine says
_ENTRY = re.compile(r"([A-Za-z][\w-]*)[ =]+v?(\d[^\s,;]*)")


@functools.cache
def own_versions() -> Mapping[str, str]:
    """Return the versions of the packages that are installed here."""
    found = {}
    for name in COMPARED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not-installed"
    return found


def as_text(versions: Mapping[str, str]) -> str:
    """Return versions as ``differences`` reads them:
    ``fedbn-flwr 0.2.0, torch 2.14.1, flwr 1.41.0``.
    """
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def differences(here: Mapping[str, str], there: str) -> list[tuple[str, bool]]:
    """Return how the versions of another machine, as text, differ from those here.

    Returns:
        A sentence for each package, and whether it is serious: another version of this
        package, whose messages may differ, or another minor version of Flower, which
        Flower itself refuses. Another torch may change the last bits. A package that
        the text does not have is left out.
    """
    theirs = dict(_ENTRY.findall(there[:_LONGEST]))
    found = []
    for name in COMPARED:
        ours, other = here.get(name, ""), theirs.get(name, "")
        if not ours or not other or _public(ours) == _public(other):
            continue
        serious = name == "fedbn-flwr" or (
            name == "flwr" and _minor(ours) != _minor(other)
        )
        found.append((f"{name} is {ours} here and {other} there", serious))
    return found


def _public(version: str) -> str:
    """Return a version without what names a build: 2.14.1 of 2.14.1+cu130."""
    return version.partition("+")[0]


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
