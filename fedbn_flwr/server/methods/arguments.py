"""The methods of a strategy, and their settings as arguments of its constructor."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.problems import Known, raise_or_warn
from fedbn_flwr.server.methods.method import Method
from fedbn_flwr.server.methods.params import Params, is_list
from fedbn_flwr.server.methods.together import Methods

__all__ = ["Combination", "all_arguments", "given_arguments", "methods_with"]

StrategyClass: TypeAlias = Any
"""A ``type[server.strategy.Strategy]``. Its module imports this one."""


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

    def methods(self, params: Any) -> Methods:
        """Return the methods with these settings."""
        return Methods(self.kinds, params)


def _method_arguments(strategy: StrategyClass) -> inspect.Signature:
    """Return the arguments of Flower's FedAvg, and the settings by name only."""
    fields = strategy.Params.model_fields
    named = dict(inspect.signature(FlowerFedAvg).parameters)
    # The settings of every method come last.
    for name in sorted(fields, key=Params.model_fields.__contains__):
        own = named.get(name) or inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
        field = fields[name]
        annotation = str | Sequence[str] if is_list(field) else field.annotation
        named[name] = own.replace(default=field.default, annotation=annotation)
    return inspect.Signature([*named.values()])


def all_arguments(strategy: StrategyClass, base: StrategyClass) -> inspect.Signature:
    """Return all arguments of a class that has the constructor of ``base``."""
    own = [
        one
        for one in inspect.signature(base.__init__).parameters.values()
        if one.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    made = _method_arguments(strategy)
    return made.replace(parameters=[*made.parameters.values(), *own])


def given_arguments(
    strategy: StrategyClass, by_place: Sequence[Any], by_name: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the value of each argument of Flower and of the settings, by name.

    Args:
        strategy: the class of the strategy.
        by_place: the arguments given by place.
        by_name: the arguments given by name, without those of ``Strategy`` itself.

    Raises:
        TypeError: there are too many arguments, one does not exist, or one is given
            twice.
        ConfigError: a share of the clients is not a number from 0 to 1.
    """
    found = _method_arguments(strategy).bind(*by_place, **by_name)
    found.apply_defaults()
    for name in ("fraction_train", "fraction_evaluate"):
        share = found.arguments[name]
        if not isinstance(share, Real) or not 0 <= float(share) <= 1:
            raise ConfigError(
                f"strategy {strategy.name!r}: {name}={share!r} must be a number from 0"
                " to 1"
            )
    return found.arguments


def methods_with(
    strategy: StrategyClass, given: Mapping[str, Any], parts: Parts | None
) -> Methods:
    """Return the methods of a strategy with the given settings.

    Args:
        strategy: the class of the strategy.
        given: the value of each argument.
        parts: the given split of the model's state. It may name personal entries.

    Raises:
        ConfigError: a value is out of range, a setting has no effect, or its value
            needs the modules of the model.
    """
    values = {}
    for name, field in strategy.Params.model_fields.items():
        value = given[name]
        listed = is_list(field) and not isinstance(value, str)
        values[name] = ",".join(value) if listed else value
    if parts is not None and not values["personal"]:
        values["personal"] = ",".join(parts.personal)
    methods: Methods = strategy.combination.methods(strategy.Params(**values))
    # Leave out warnings, because they are logged at the start of a run.
    known = Known(fraction_train=given["fraction_train"])
    problems = methods.problems(known, ["settings"])
    refused = [problem for problem in problems if problem.effect != "warn"]
    raise_or_warn(methods.params.told(refused))
    return methods
