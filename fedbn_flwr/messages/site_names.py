"""The rules for names of sites.

A name is shown next to the number of a client. It is never read as a number, and it is
never a key of a state or a file: the number identifies the client.
"""

from __future__ import annotations

import csv
import io
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

LONGEST = 80
"""The most characters of a name."""

# They join letters in Persian and in Indic scripts, and are invisible elsewhere.
_JOINERS = "\u200c\u200d"


def fault_of(name: object) -> str:
    """Return the reason why a value cannot be the name of a site, or ""."""
    if not isinstance(name, str):
        return f"{name!r} is not a text. Write it as a text, such as '{name}'."
    if not name.strip():
        return f"{name!r} is empty. Give the site a name of 1 to {LONGEST} characters."
    if len(name) > LONGEST:
        return (
            f"{name[:LONGEST]!r}... has {len(name)} characters, but {LONGEST} are"
            " allowed."
        )
    # An invisible character can break a line of the log, or reverse its order.
    for character in name:
        is_space = unicodedata.category(character) == "Zs"
        if not (character.isprintable() or is_space or character in _JOINERS):
            return (
                f"{name!r} has the control character U+{ord(character):04X}. Remove it."
            )
    return ""


def fault_of_list(names: Sequence[object]) -> str:
    """Return the reason why values cannot be the names of different sites, or ""."""
    for name in names:
        fault = fault_of(name)
        if fault:
            return fault
    for name, count in Counter(names).items():
        if count > 1:
            return f"{name!r} is there {count} times. Give each site its own name."
    return ""


def texts_of(names: Mapping[str, str]) -> dict[str, str]:
    """Return a different text for each client with a name, by number.

    The text is the name. If several clients have one name, the text begins with the
    number.
    """
    count = Counter(names.values())
    texts = {**names}
    for client, name in names.items():
        if count[name] > 1:
            texts[client] = f"client {with_name(client, name)}"
    return texts


def with_name(number: object, name: str | None) -> str:
    """Return a client's number with its name, or only the number without a name."""
    return f"{number} ({name})" if name else str(number)


def as_list(names: Iterable[str]) -> str:
    """Return names as the comma list of a setting, such as ``held-out-clients``.

    A name with a comma has quotes, as in CSV.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(names)
    listed = text.getvalue()
    # Without a comma, a number is a number of clients.
    return f"{listed}," if listed.isdecimal() else listed
