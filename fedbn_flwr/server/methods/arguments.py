"""The methods of a strategy, and their settings as arguments of its constructor."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.problems import Known
from fedbn_flwr.server.methods.method import Method
from fedbn_flwr.server.methods.params import Params, about
from fedbn_flwr.server.methods.together import Methods

__all__ = ["FLOWERS", "Combination", "refuse_shares"]

FLOWERS = inspect.signature(FlowerFedAvg).parameters
"""The arguments of Flower's FedAvg."""


@dataclass(frozen=True)
class Combination:
    """The methods of a strategy's class.

    Attributes:
        kinds: the classes of the methods, in the order in which they act.
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
            listed = about(field).get("is_list")
            annotation = str | Sequence[str] if listed else field.annotation
            named[name] = own.replace(default=field.default, annotation=annotation)
        return inspect.Signature([*named.values()])

    def methods(self, params: Any) -> Methods:
        """Return the methods with these settings."""
        return Methods(self.kinds, params)

    def methods_given(self, given: Mapping[str, Any], parts: Parts | None) -> Methods:
        """Return the methods with the arguments of a constructor, after their checks.

        ``parts``, the given split of the model's state, may name personal entries.

        Raises:
            ConfigError: a value is out of range, or a setting has no effect.
        """
        values = {}
        for name, field in self.Params.model_fields.items():
            value = given[name]
            if about(field).get("is_list") and not isinstance(value, str):
                value = ",".join(value)
            values[name] = value
        if parts is not None and not values["personal"]:
            values["personal"] = ",".join(parts.personal)
        methods = self.methods(self.Params(**values))
        methods.raise_or_warn(Known(parts=parts), ["settings"])
        return methods


def refuse_shares(strategy: str, given: Mapping[str, Any]) -> None:
    """Raise ConfigError if a share of the clients is not a number from 0 to 1."""
    for name in ("fraction_train", "fraction_evaluate"):
        share = given[name]
        if not isinstance(share, Real) or not 0 <= float(share) <= 1:
            raise ConfigError(
                f"strategy {strategy!r}: {name}={share!r} must be a number from 0 to 1"
            )
