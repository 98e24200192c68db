"""The versions that a node and its server compare before round 1."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib import metadata

COMPARED = ("fedbn-flwr", "torch", "flwr")
_LONGEST = 500  # characters that are read of a text from another machine
# An entry of a text such as ``fedbn-flwr 0.2.0`` or ``torch = v2.14.1``.
_ENTRY = re.compile(r"([A-Za-z][\w-]*)[ =]+v?(\d[^\s,;]*)")


@functools.cache
def own_versions(*more: str) -> Mapping[str, str]:
    """Return the versions of the installed packages of ``COMPARED``, and of ``more``."""
    found = {}
    for name in (*COMPARED, *more):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not-installed"
    return found


def as_text(versions: Mapping[str, str]) -> str:
    """Return versions in the form ``torch 2.14.1, flwr 1.41.0``."""
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def differences(there: str) -> list[tuple[str, bool]]:
    """Return how another machine's versions, as text, differ from the versions here.

    Returns:
        A sentence for each package, and whether the difference is serious. Another
        version of this package is serious, because the messages may differ. Another
        minor version of Flower is serious, because Flower refuses it. Another torch may
        only change the last bits. A package that is missing in the text is left
        out.
    """
    theirs = dict(_ENTRY.findall(there[:_LONGEST]))
    found = []
    for name, ours in own_versions().items():
        other = theirs.get(name, "")
        # Ignore the suffix of a build, because 2.14.1+cu130 is the same version as
        # 2.14.1.
        if not other or ours.split("+")[0] == other.split("+")[0]:
            continue
        serious = name == "fedbn-flwr"
        if name == "flwr":
            serious = ours.split(".")[:2] != other.split(".")[:2]
        found.append((f"{name} is {ours} here and {other} there", serious))
    return found
