"""The strategies, each in one file.

``STRATEGIES`` maps the names used in configs to the classes.

``combined`` makes one strategy of several: one method's local parts, another's local
training, a third's server step. ``register`` makes the client hooks of a method of your
own project known. At the end of its file, a method has the ``checks`` with its refusals:
the server evaluates them before and in a run, and ``refuse_on_client`` evaluates them
with the facts of a client's training. Refusals that follow from a method's ``phases``
are in ``server.methods.together``. This package also has the names that a method of your
own needs (``Method``, ``Phase``, ...).
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import create_model

from fedbn_flwr.errors import ConfigError, unknown_name
from fedbn_flwr.messages.protocol import PREFIX
from fedbn_flwr.problems import Known, Problem, found_problems, raise_or_warn
from fedbn_flwr.server.methods.combination import Combination
from fedbn_flwr.server.methods.method import (
    Ask,
    Facts,
    Method,
    Replies,
)
from fedbn_flwr.server.methods.options import OPTIONS
from fedbn_flwr.server.methods.params import setting
from fedbn_flwr.server.methods.phases import (
    ALL,
    BATCHNORM,
    TRACKED,
    Extra,
    Phase,
    in_common,
    single_decisions,
)
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.strategies.fedavg import FedAvgMethod
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.transport.hook_context import HookContext

# A type checker sees the same classes with the arguments of their constructors, which
# ``make generate`` writes. At run time, ``Strategy`` makes them from the settings.
if TYPE_CHECKING:
    from fedbn_flwr.strategies.constructors import *  # noqa: F403
else:
    from fedbn_flwr.strategies.ditto import Ditto
    from fedbn_flwr.strategies.fedavg import FedAvg
    from fedbn_flwr.strategies.fedavgm import FedAvgM
    from fedbn_flwr.strategies.fedbn import FedBN
    from fedbn_flwr.strategies.fedbs import FedBS
    from fedbn_flwr.strategies.feddna import FedDNA
    from fedbn_flwr.strategies.fednova import FedNova
    from fedbn_flwr.strategies.fedopt import FedAdagrad, FedAdam, FedYogi
    from fedbn_flwr.strategies.fedprox import FedProx
    from fedbn_flwr.strategies.fedrep import FedRep
    from fedbn_flwr.strategies.fedtan import FedTAN
    from fedbn_flwr.strategies.fedtan2 import FedTAN2
    from fedbn_flwr.strategies.fedwon import FedWon
    from fedbn_flwr.strategies.fixbn import FixBN
    from fedbn_flwr.strategies.hbn import HBN
    from fedbn_flwr.strategies.mtfl import MTFL
    from fedbn_flwr.strategies.scaffold import Scaffold
    from fedbn_flwr.strategies.silobn import SiloBN
    from fedbn_flwr.strategies.standalone import Standalone
    from fedbn_flwr.strategies.staticbn import StaticBN

__all__ = [
    "ALL",
    "BATCHNORM",
    "HBN",
    "METHODS",
    "MTFL",
    "STRATEGIES",
    "TRACKED",
    "Ask",
    "Combination",
    "Ditto",
    "Extra",
    "Facts",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBN",
    "FedBS",
    "FedDNA",
    "FedNova",
    "FedProx",
    "FedRep",
    "FedTAN",
    "FedTAN2",
    "FedWon",
    "FedYogi",
    "FixBN",
    "Known",
    "Method",
    "Phase",
    "Problem",
    "Replies",
    "Scaffold",
    "SiloBN",
    "Standalone",
    "StaticBN",
    "Strategy",
    "StrategyClass",
    "combined",
    "make_hooks",
    "register",
    "setting",
]

Kind = Method[Any, Any]
_PACKAGE = "fedbn_flwr."
StrategyClass = type[Strategy]
"""A strategy without settings."""

# Combined methods act in this order: a method that restores entries comes after a
# method with a server step.
STRATEGIES: Mapping[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (
        FedAvg,
        FedProx,
        Ditto,
        Scaffold,
        FedAvgM,
        FedAdam,
        FedYogi,
        FedAdagrad,
        FedNova,
        FedBN,
        SiloBN,
        MTFL,
        StaticBN,
        FixBN,
        FedTAN,
        FedTAN2,
        FedDNA,
        FedBS,
        FedWon,
        Standalone,
        FedRep,
        HBN,
    )
}
METHODS: Mapping[str, type[Kind]] = {
    name: strategy.combination.kinds[0] for name, strategy in STRATEGIES.items()
}
# Only `register` changes this list. No strategy of the package depends on it.
_REGISTERED: list[type[Kind]] = []
Registered = TypeVar("Registered", bound=type[Kind])


def register(kind: Registered) -> Registered:
    """Register the client hooks of your own method in this process.

    ::

        @register
        class MineMethod(Method): ...

    Use it as a decorator. The server app and the client app import the module of the
    class. A class with the same name and module replaces the earlier class, for example
    if a notebook cell runs again.

    Args:
        kind: a subclass of Method that defines its ``name``.

    Raises:
        ConfigError: another method makes a client hook of the same name in another way.
    """
    place = _place(kind)
    if "name" not in vars(kind):
        raise ConfigError(
            f"register({place}): the class inherits {kind.name!r}. Give it a name: name"
            " = 'my-method'."
        )
    makers = _makers()
    for hook, make in kind.client_hooks.items():
        other = makers.get(hook, kind)
        # If a notebook cell runs again, it makes new classes and new makers.
        same_class = place in map(_place, other.__mro__)
        if other.client_hooks[hook] is not make and not same_class:
            raise ConfigError(
                f"client hook {hook!r} of strategy {kind.name!r} ({place}) has the name"
                f" of a hook of strategy {other.name!r} ({_place(other)}). Give it"
                " another name."
            )
    others = [other for other in _REGISTERED if _place(other) != place]
    _REGISTERED[:] = [*others, kind]
    return kind


def _place(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _makers() -> dict[str, type[Kind]]:
    """Return the method that makes each client hook, by the name of the hook.

    A method of the package has priority, and then the method registered last.
    """
    # A later entry replaces an earlier entry, so FedTAN's hooks come from FedTAN and
    # not from FedTAN-II.
    kinds = (*_REGISTERED, *reversed(list(METHODS.values())), *OPTIONS)
    makers: dict[str, type[Kind]] = {}
    for kind in kinds:
        makers |= dict.fromkeys(kind.client_hooks, kind)
    return makers


def combined(*strategies: StrategyClass) -> StrategyClass:
    """Return a strategy with the methods of all these strategies.

    ::

        combined(FixBN, FedProx)(freeze_at=5)

    Each method changes the part of FedAvg that its ``role`` names: the local part, the
    local training or the server's step. The order of the arguments has no effect. The
    combination has the settings of all methods.

    Raises:
        ConfigError: two of the methods cannot be combined; the message has the reason
            for each pair. Or a class overrides more than the method, and a combination
            would leave out these functions.
    """
    # FedAvg changes nothing, and a strategy that is named twice counts once.
    others = [kind for kind in dict.fromkeys(strategies) if kind is not FedAvg]
    if len(others) < 2:
        return others[0] if others else FedAvg
    for strategy in others:
        overridden = _overrides(strategy)
        if overridden:
            raise ConfigError(
                f"combined takes the methods of {strategy}, but it would leave out"
                f" functions of the class: {', '.join(overridden)}. Write a class with these"
                " functions and `method = combined(...)`."
            )
    # Map each method to the first strategy that has it.
    chosen: dict[type[Kind], StrategyClass] = {}
    for strategy in others:
        for kind in strategy.combination.kinds:
            chosen.setdefault(kind, strategy)
    # A user's subclass of FedAvg has FedAvg's method. Leave it out, because it changes
    # nothing.
    chosen.pop(FedAvgMethod, None)
    if len(chosen) < 2:
        return next(iter(chosen.values()), others[0])
    # Sort the methods, so that combined(A, B) and combined(B, A) are the same object.
    return _combined(tuple(sorted(chosen, key=_rank)))


def _overrides(strategy: StrategyClass) -> list[str]:
    """Return the names that a user's classes define in addition to the method."""
    names: set[str] = set()
    for base in strategy.__mro__:
        if not issubclass(base, Strategy) or base.__module__.startswith(_PACKAGE):
            continue
        for name in vars(base):
            if name == "__init__" or not name.startswith("_"):
                names.add(name)
    return sorted(names - {"method", "combination", "name", "Params", "like"})


def _rank(kind: type[Kind]) -> tuple[int, int, str]:
    """Return the sorting key of a method, by its place in the registry.

    A subclass has the place of its base. Any other method of a user has FedAvg's place,
    so that FixBN restores entries after the server step of this method.
    """
    registry = list(METHODS.values())
    place = 0
    for base in reversed(kind.__mro__):
        if base in registry:
            place = registry.index(base)
    # A subclass acts after its base. Names decide the remaining order.
    return place, len(kind.__mro__), _place(kind)


# Cache the combination, so that combined(A, B) is combined(B, A).
@functools.cache
def _combined(kinds: tuple[type[Kind], ...]) -> StrategyClass:
    """Return the strategy of sorted methods.

    Raises:
        ConfigError: two of the methods cannot be combined.
    """
    problems = []
    for first, second in itertools.combinations(kinds, 2):
        why = _why_not_combined(first, second)
        if why:
            problems.append(f"{first.name} and {second.name} cannot be combined: {why}")
    if problems:
        raise ConfigError("\n".join(problems), code="not-combined")
    params = list(dict.fromkeys(kind.Params for kind in reversed(kinds)))
    # Leave out a class if one of its subclasses is also a base, because Python refuses
    # both in that order.
    bases = []
    for one in params:
        below = [other for other in params if issubclass(other, one)]
        if below == [one]:
            bases.append(one)
    title = "And".join(kind.__name__.removesuffix("Method") for kind in kinds)
    params_of_all = create_model(f"{title}Params", __base__=tuple(bases))

    class Combined(Strategy):
        """Several methods as one strategy, made by ``combined``."""

        method = Combination(kinds, params_of_all)

    return Combined


def _why_not_combined(first: type[Kind], second: type[Kind]) -> str:
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


def make_hooks(names: Collection[str], context: HookContext) -> dict[str, ClientHook]:
    """Return the client hooks that a training message names, in its order.

    Raises:
        ConfigError: the message names a hook that neither this version nor a registered
            strategy has; or its method has a problem with the client's training.
    """
    makers = _makers() if names else {}
    for name in names:
        if name not in makers:
            raise ConfigError(
                f"{unknown_name('client hook', name, makers)} If its strategy belongs"
                " to your own project, write @register above the class of its method,"
                " and also import its module in the client app."
            )
    refuse_on_client(names, context.config, context.known)
    return {name: makers[name].client_hooks[name](context) for name in names}


def refuse_on_client(
    names: Collection[str], config: Mapping[str, Any], known: Known
) -> None:
    """Raise the problems that the methods of client hooks have with local training.

    The server evaluates the same checks. A check is skipped if the message lacks a setting
    that the check names.

    Args:
        names: the client hooks.
        config: the config of the message; its keys name the settings of the methods.
        known: the facts of the client's training.
    """
    makers = _makers() if names else {}
    own = {key.removeprefix(PREFIX).replace("-", "_"): config[key] for key in config}
    problems: list[Problem] = []
    for name in names:
        kind = makers[name]
        method = kind(kind.Params.model_construct(**own))
        unsent = kind.Params.model_fields.keys() - own.keys()
        checks = [one for one in kind.checks if unsent.isdisjoint(one.keys.split())]
        # Leave out warnings, because the server has logged them.
        found = found_problems(checks, method, known, ["run"])
        problems += [problem for problem in found if problem.effect == "refuse"]
    raise_or_warn(dict.fromkeys(problems))


# In a checkout, the link ``strategies`` leads to this folder. Its modules are the same
# modules under short names, because a second copy would have other classes.
if __name__ == "strategies":
    for name, module in [*sys.modules.items()]:
        if name.startswith("fedbn_flwr.strategies"):
            sys.modules[name.removeprefix(_PACKAGE)] = module
