"""The methods of a strategy's class, with their settings as its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fedbn_flwr.server.methods.method import Method
from fedbn_flwr.server.methods.params import Params, extras_of

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
