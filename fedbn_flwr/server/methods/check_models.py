"""The models that the methods of a run refuse.

The needed layers, their entries, and the entries in common follow from the declarations
of the methods (``Phase``). If only one method has a need, the need is a row in the
file of this method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from fedbn_flwr.batchnorm.parts import Part, Parts
from fedbn_flwr.batchnorm.tied_entries import tied_apart
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.problems import Known, Problem
from fedbn_flwr.server.methods.method import Method
from fedbn_flwr.server.methods.phases import (
    ALL,
    in_common,
    model_needs,
)

_NEEDED = {Part.AFFINE: "gamma and beta", Part.STATISTICS: "running statistics"}
_WITHOUT = {
    Part.AFFINE: "affine=False",
    Part.STATISTICS: "track_running_stats=False",
}
_NONE_FOUND_BY_NAME = (
    "no BatchNorm that is recognised by the names of its arrays (BatchNorm without"
    " running statistics is found only with parts=split_state(model))"
)


def problems_of_model(methods: Any, known: Known) -> Iterator[Problem]:
    """Yield the problems that the methods have with the model.

    ``methods``: the methods of a run, ``together.Methods``.
    """
    parts = known.parts
    if parts is None:
        return
    # Standalone never shares an entry, as its documentation states, so it is allowed.
    kept = parts.select(methods.local)
    if kept and kept == parts.names and methods.local != ALL:
        yield _misfit(
            "nothing-shared",
            f"{methods.name} keeps every entry with the clients, but {known.model} has"
            " none to share",
            "standalone, or fewer personal entries",
            "personal",
        )
    # If the split follows from names, the clients find tied entries.
    yield from tied_apart(parts.tied, kept)
    for method in methods:
        yield from _of_layers(method, known, parts)
        yield from _of_personal(method, known, parts)


def _misfit(code: str, text: str, remedy: str, keys: str = "strategy") -> Problem:
    """Return the problem of a model that does not fit."""
    return Problem(code, text, keys, stage="model", remedy=remedy, error=NormLayerError)


def _of_layers(
    method: Method[Any, Any], known: Known, parts: Parts
) -> Iterator[Problem]:
    """Yield a problem for each part of BN that a method needs and the model lacks."""
    # Ignore the choice of personal entries: a layer with personal entries is still a
    # layer of the model.
    parts = dataclasses.replace(parts, personal=())
    # Either the model has no layer, or no layer has the parts that the method needs.
    for wanted in model_needs(method.whole):
        if not parts.layers:
            has = _NONE_FOUND_BY_NAME if parts.by_names else known.has
            yield _misfit(
                "no-batchnorm",
                f"{method.title} needs BatchNorm, but {known.model} has"
                f" {known.untrained or has}",
                f"{method.instead}, or a model with BatchNorm",
            )
        elif wanted and not parts.select(wanted):
            named = [part for part in _NEEDED if part in wanted]
            kind = f"BatchNorm with {' or '.join(_NEEDED[part] for part in named)}"
            reasons = ", ".join(_WITHOUT[part] for part in named)
            has = f"{parts.named_layers()} without ({reasons})"
            yield _misfit(
                "batchnorm-lacks-entries",
                f"{method.title} needs {kind}, but {known.model} has"
                f" {known.untrained or has}",
                f"{method.instead}, or a model with {kind}",
            )


def _of_personal(
    method: Method[Any, Any], known: Known, parts: Parts
) -> Iterator[Problem]:
    """Yield a problem if the method needs personal entries of all clients in common."""
    common = in_common(method.whole)
    # Skip layers outside ``layers``, because the method does not act on them.
    by_type = dataclasses.replace(parts, personal=()).part_of
    needed = [name for name in parts.personal if by_type[name] in common]
    if needed:
        named = ", ".join(dict.fromkeys(by_type[name] for name in needed))
        yield _misfit(
            "personal-in-common",
            f"{method.title} needs the {named} of all clients in common, but"
            f" {known.model} has '{needed[0]}' among its personal entries"
            f" ({len(needed)} such)",
            f"{method.instead}, or leave them out of personal",
            "personal",
        )
