"""The methods of a strategy's class, and the methods that exclude each other."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fedbn_flwr.server.methods.method import Method
from fedbn_flwr.server.methods.params import Params, extras_of
from fedbn_flwr.server.methods.phases import in_common, single_decisions

FLOWERS = inspect.signature(FlowerFedAvg).parameters
"""The arguments of Flower's FedAvg."""


@dataclass(frozen=True)
class Combination:
    """The methods of a strategy's class.

    Attributes:
        kinds: the classes of the methods, in the order of their work.
        Params: the class of all their settings.
    """

    kinds: tuple[type[Method[Any, Any]], ...]
    Params: type[Any]

    @property
    def name(self) -> str:
        """The names of the methods."""
        return "+".join(kind.name for kind in self.kinds)

    @cached_property
    def arguments(self) -> inspect.Signature:
        """The arguments of Flower's FedAvg, and the settings by name only."""
        fields = self.Params.model_fields
        named = dict(FLOWERS)
        # The settings of every method come last.
        for name in sorted(fields, key=Params.model_fields.__contains__):
            kind = inspect.Parameter.KEYWORD_ONLY
            own = named.get(name) or inspect.Parameter(name, kind)
            field = fields[name]
            is_list = extras_of(field).get("is_list")
            annotation = str | Sequence[str] if is_list else field.annotation
            named[name] = own.replace(default=field.default, annotation=annotation)
        return inspect.Signature([*named.values()])


def why_not_combined(
    first: type[Method[Any, Any]], second: type[Method[Any, Any]]
) -> str:
    """Return why two methods cannot be combined, or "" if they can."""
    for kind in (first, second):
        if kind.alone or not kind.role:
            return kind.alone or f"{kind.name} is not combined with other methods"
    # Use the defaults: the settings do not change whether a pair is allowed.
    phases = {kind: kind(kind.Params()).all_phases for kind in (first, second)}
    both = single_decisions(phases[first]) & single_decisions(phases[second])
    if both:
        return f"both decide {' and '.join(sorted(both))}"
    for one, other in ((first, second), (second, first)):
        apart = in_common(phases[one]) & phases[other].local
        if apart:
            return (
                f"{one.name} needs {', '.join(sorted(apart))} in common, but"
                f" {other.name} keeps them with the clients"
            )
    return ""
