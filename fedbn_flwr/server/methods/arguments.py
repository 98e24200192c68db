"""The methods of a strategy, and their settings as arguments of its constructor."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.problems import Known, tell
from fedbn_flwr.server.methods.method import Method
from fedbn_flwr.server.methods.params import Params, is_list
from fedbn_flwr.server.methods.together import Methods

__all__ = ["Combination", "all_arguments", "given_arguments", "methods_with"]

logger = logging.getLogger("flwr")

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

    @property
    def ignored(self) -> dict[str, str]:
        """The arguments of Flower's strategies that have no effect, with the reason."""
        ignored: dict[str, str] = {}
        for kind in self.kinds:
            ignored |= kind.ignored
        return ignored

    def methods(self, params: Any) -> Methods:
        """Return the methods with these settings."""
        return Methods(self.kinds, params)


def _method_arguments(strategy: StrategyClass) -> inspect.Signature:
    """Return the arguments of Flower and of the settings, with their defaults.

    The arguments of ``strategy.like``, Flower's class for the method, have the same
    place here. Those that are not settings have Flower's default.
    """
    fields, ignored = strategy.Params.model_fields, strategy.combination.ignored
    named = dict(inspect.signature(FlowerFedAvg).parameters)
    for name, argument in inspect.signature(strategy.like).parameters.items():
        if name in fields or name in ignored:
            named.setdefault(name, argument)
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
    strategy: StrategyClass,
    base: StrategyClass,
    by_place: Sequence[Any],
    by_name: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the value of each argument of Flower and of the settings, by name.

    Arguments of Flower's strategies that have no effect are left out, with a warning.

    Args:
        strategy: the class of the strategy.
        base: the class with the constructor.
        by_place: the arguments given by place.
        by_name: the arguments given by name, without those that ``base`` names.

    Raises:
        TypeError: there are too many arguments, one does not exist, or one is given
            twice.
        ConfigError: a share of the clients is not a number from 0 to 1.
    """
    called = f"{strategy.__name__}.__init__() of strategy {strategy.name!r}"
    shown = _method_arguments(strategy)
    by_name = _without_ignored(strategy, shown, by_name)
    unknown = [name for name in by_name if name not in shown.parameters]
    if unknown:
        hint = _hint(unknown[0], strategy, base)
        raise TypeError(
            f"{called} got an unexpected keyword argument {unknown[0]!r}{hint}"
        )
    try:
        found = shown.bind(*by_place, **by_name)
    except TypeError as error:
        raise TypeError(f"{called}: {error}") from None
    found.apply_defaults()
    for name in ("fraction_train", "fraction_evaluate"):
        share = found.arguments[name]
        if not isinstance(share, Real) or not 0 <= float(share) <= 1:
            raise ConfigError(
                f"strategy {strategy.name!r}: {name}={share!r} must be a number from 0"
                " to 1"
            )
    return found.arguments


def _without_ignored(
    strategy: StrategyClass, shown: inspect.Signature, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Leave out arguments of Flower's strategies without effect, with a warning."""
    used, ignored = dict(given), strategy.combination.ignored
    for name in ignored.keys() & used.keys():
        value, known = used.pop(name), shown.parameters.get(name)
        # Ignore Flower's default in the signature, because the user did not set it.
        if value is None or (known is not None and value == known.default):
            continue
        logger.warning(
            "strategy %r: %s=%s has no effect, as in Flower: %s. Leave %s out.",
            strategy.name,
            name,
            value,
            ignored[name],
            name,
        )
    return used


def _hint(name: str, strategy: StrategyClass, base: StrategyClass) -> str:
    """Return a text that names a similar argument, or the methods that have this one.

    Python cannot suggest these names, because only ``Params`` contains them.
    """
    known = [*strategy.Params.model_fields, *all_arguments(base, base).parameters]
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f". Did you mean {near[0]!r}?"
    others = [
        kind.name
        for kind in _below(base)
        if name in kind.Params.model_fields and len(kind.combination.kinds) == 1
    ]
    return f": it is an argument of {', '.join(others)}" if others else ""


def _below(kind: StrategyClass) -> Iterator[StrategyClass]:
    """Yield the subclasses of a class, and theirs."""
    for below in kind.__subclasses__():
        yield below
        yield from _below(below)


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
    tell(methods.params.told(refused))
    return methods
