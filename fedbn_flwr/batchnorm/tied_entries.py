"""Entries of a state that share a tensor, and the refusal to separate them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import nn

from fedbn_flwr.problems import Problem

__all__ = ["equal_entries", "tied_apart", "tied_entries"]


def tied_entries(model: nn.Module) -> dict[str, str]:
    """Map each entry that shares an earlier entry's tensor to the earlier entry."""
    # keep_vars=True returns the tensors of the model. Without it, each entry would be a
    # new tensor with an id of its own.
    state = model.state_dict(keep_vars=True)
    return _repeated((name, id(tensor)) for name, tensor in state.items())


def equal_entries(state: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, str]:
    """Map each entry that is equal to an earlier entry to the earlier entry.

    Tied weights are equal. Without the model, only the numbers reveal a tie. Constant
    entries are left out, because many entries start as all 0 or all 1.
    """
    varied = {name: a for name, a in state.items() if (a != a.flat[:1]).any()}
    return _repeated(
        (name, (a.shape, hashlib.sha256(a.tobytes()).digest()))
        for name, a in varied.items()
    )


def _repeated(values: Iterable[tuple[str, Hashable]]) -> dict[str, str]:
    """Map each name that repeats a value to the first name with this value."""
    first: dict[Hashable, str] = {}
    repeated = {}
    for name, value in values:
        earlier = first.setdefault(value, name)
        if earlier != name:
            repeated[name] = earlier
    return repeated


def tied_apart(
    tied: Mapping[str, str], local: Collection[str], unless: str = ""
) -> Iterator[Problem]:
    """Yield a problem if a tied tensor stays with the client under only one name.

    Only the first such tensor is reported.

    Args:
        tied: see ``Parts.tied``.
        local: the entries that stay with the client.
        unless: a further sentence that is appended to the message.
    """
    for pair in tied.items():
        stays, shared = sorted(pair, key=lambda name: name not in local)
        if stays in local and shared not in local:
            yield Problem(
                "tied-apart",
                f"'{stays}' stays with the client, but '{shared}' is shared. Both are"
                " names of the same tensor, so one would overwrite the other. Untie"
                " them in the model, name both in personal, or use a strategy that"
                f" shares both.{unless}",
                "personal",
                "model",
            )
            return
