"""The strategies, one file per paper. ``STRATEGIES`` maps the names used in configs to the classes.

``combined`` makes one strategy of several: one method's local parts, another's local training, a third's server step.
``register`` makes the client hooks of a method of your own project known.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import create_model

from fedbn_flwr.errors import ConfigError, unknown_name
from fedbn_flwr.server.method import HookContext
from fedbn_flwr.strategies.bn_scaffold import BNScaffold
from fedbn_flwr.strategies.fbn import FBN
from fedbn_flwr.strategies.fedavg import FedAvg
from fedbn_flwr.strategies.fedavgm import FedAvgM
from fedbn_flwr.strategies.fedbn import FedBN
from fedbn_flwr.strategies.fedbs import FedBS
from fedbn_flwr.strategies.feddna import FedDNA
from fedbn_flwr.strategies.fedopt import FedAdagrad, FedAdam, FedYogi
from fedbn_flwr.strategies.fedprox import FedProx
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
from fedbn_flwr.training.client_hook import ClientHook

__all__ = [
    "FBN",
    "HBN",
    "MTFL",
    "STRATEGIES",
    "BNScaffold",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBN",
    "FedBS",
    "FedDNA",
    "FedProx",
    "FedTAN",
    "FedTAN2",
    "FedWon",
    "FedYogi",
    "FixBN",
    "Scaffold",
    "SiloBN",
    "Standalone",
    "StaticBN",
    "combined",
    "make_hooks",
    "register",
]

STRATEGIES: Mapping[str, type[FedAvg[Any]]] = {
    strategy.name: strategy
    for strategy in (
        *(FedAvg, FedProx, Scaffold, BNScaffold),
        *(FedAvgM, FedAdam, FedYogi, FedAdagrad),
        *(FedBN, SiloBN, MTFL),
        *(StaticBN, FixBN, FBN, HBN, FedTAN, FedTAN2, FedDNA),
        *(FedBS, FedWon, Standalone),
    )
}
_REGISTERED: list[type[FedAvg[Any]]] = []  # only `register` writes here, and no strategy of the package depends on it
S = TypeVar("S", bound=type[FedAvg[Any]])


def register(method: S) -> S:
    """Make the client hooks of your own method known in this process, and return the method: a decorator of its class.

    ::

        @register
        class Mine(FedAvg): ...

    The server app and the client app import the module of the class. A class of the same name and module replaces the
    former one, as in a notebook cell that is run again.

    Args:
        method: a subclass of FedAvg with a ``name`` of its own.

    Raises:
        ConfigError: the class is no such subclass, or another strategy makes a client hook of the same name in another
            way.
    """
    if not (isinstance(method, type) and issubclass(method, FedAvg)):
        raise ConfigError(f"register({method!r}): it takes a subclass of fedbn_flwr.strategies.FedAvg, by @register.")
    place = _place(method)
    if "name" not in vars(method):
        raise ConfigError(f"register({place}): the class inherits {method.name!r}. Give it a name: name = 'my-method'.")
    makers = _makers()
    for hook, make in method.client_hooks.items():
        other = makers.get(hook, method)
        if other.client_hooks[hook] is not make and place not in map(_place, other.__mro__):  # nor the former class
            raise ConfigError(
                f"client hook {hook!r} of strategy {method.name!r} ({place}) has the name of another one, of strategy "
                f"{other.name!r} ({_place(other)}). Give it another name."
            )
    _REGISTERED[:] = [*(kind for kind in _REGISTERED if _place(kind) != place), method]
    return method


def _place(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _makers() -> dict[str, type[FedAvg[Any]]]:
    """Return a strategy for each client hook, by the hook's name: one of the package, or the one registered last."""
    return {hook: kind for kind in (*_REGISTERED, *reversed([*STRATEGIES.values()])) for hook in kind.client_hooks}


def combined(*methods: type[FedAvg[Any]]) -> type[FedAvg[Any]]:
    """Return the strategy that does what all ``methods`` do: ``combined(FixBN, FedProx)(freeze_at=5)``.

    Each method changes the place of FedAvg that its ``role`` names: what stays with the clients, the local training or
    the server's step. The order of the arguments has no meaning. The settings are those of all methods.

    Raises:
        ConfigError: two of the methods cannot be combined; the error has the reason of each pair.
    """
    # A method that restores entries (FixBN) acts after the server's step: later in the registry, earlier in the MRO.
    registry = list(STRATEGIES.values())
    rank = {m: next(registry.index(kind) for kind in m.__mro__ if kind in registry) for m in methods if m is not FedAvg}
    chosen = sorted(rank, key=lambda method: (rank[method], len(method.__mro__), _place(method)), reverse=True)
    return _combined(*chosen) if len(chosen) > 1 else next(iter(chosen), FedAvg)


@functools.cache
def _combined(*chosen: type[FedAvg[Any]]) -> type[FedAvg[Any]]:
    """Return the class with these bases, the outermost first."""
    in_order = chosen[::-1]  # as in the registry
    pairs = itertools.combinations(in_order, 2)
    reasons = [(a, b, a.excludes(b) or b.excludes(a)) for a, b in pairs]
    if problems := [f"{a.name} and {b.name} cannot be combined: {why}" for a, b, why in reasons if why]:
        raise ConfigError("\n".join(problems))
    title = "And".join(method.__name__ for method in in_order)
    kinds = list(dict.fromkeys(method.Params for method in chosen))
    bases = [kind for kind in kinds if not any(other is not kind and issubclass(other, kind) for other in kinds)]
    fields = {
        "name": "+".join(method.name for method in in_order),
        "summary_line": "; ".join(method.summary_line for method in in_order),
        "source": "; ".join(method.source for method in in_order),
        "Params": create_model(f"{title}Params", __base__=tuple(bases)),
        "implicit_hooks": frozenset().union(*(method.implicit_hooks for method in chosen)),
        "__module__": __name__,
        "__doc__": f"{' and '.join(method.__name__ for method in in_order)}, combined.",
    }
    return type(title, tuple(chosen), fields)


def make_hooks(names: Iterable[str], context: HookContext) -> dict[str, ClientHook]:
    """Return the client hooks that a training message names, by name, in that order.

    Raises:
        ConfigError: the message names a hook that neither this version nor a registered strategy has.
    """
    makers = _makers()
    for name in names:
        if name not in makers:
            raise ConfigError(
                f"{unknown_name('client hook', name, makers)} If its strategy is one of your own project, write "
                "@register above the class, and import its module in the client app, too."
            )
    return {name: makers[name].client_hooks[name](context) for name in names}
