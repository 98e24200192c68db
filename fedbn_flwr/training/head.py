"""The head of a model.

It is the module that the model calls fc, classifier or head. Client and server find the
same module, because both read only the names of the entries. A head of another name
must be given as ``personal=PATH``; it is never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable

from fedbn_flwr.training.model_state import without_wrappers

HEADS = ("fc", "classifier", "head")


def head_of(names: Iterable[str]) -> str:
    """Return the only name of ``HEADS`` at the top level of the entries' names.

    The result is "" if the model has no such module, or several.
    """
    at_top = {without_wrappers(name).partition(".")[0] for name in names}
    found = at_top.intersection(HEADS)
    return found.pop() if len(found) == 1 else ""
