"""The strategies, one file per paper. ``STRATEGIES`` maps the names used in configs to the classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedbn_flwr.errors import unknown_name
from fedbn_flwr.server.method import HookContext
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
from fedbn_flwr.strategies.mtfl import MTFL
from fedbn_flwr.strategies.scaffold import Scaffold
from fedbn_flwr.strategies.silobn import SiloBN
from fedbn_flwr.strategies.standalone import Standalone
from fedbn_flwr.strategies.staticbn import StaticBN
from fedbn_flwr.training.loop import ClientHook

__all__ = [
    "MTFL",
    "STRATEGIES",
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
    "make_hooks",
]

STRATEGIES: Mapping[str, type[FedAvg[Any]]] = {
    strategy.name: strategy
    for strategy in (
        *(FedAvg, FedProx, Scaffold),
        *(FedAvgM, FedAdam, FedYogi, FedAdagrad),
        *(FedBN, SiloBN, MTFL),
        *(StaticBN, FixBN, FedTAN, FedTAN2, FedDNA),
        *(FedBS, FedWon, Standalone),
    )
}


def make_hooks(names: Iterable[str], context: HookContext) -> dict[str, ClientHook]:
    """Return the client hooks that a training message names, by name, in that order.

    Raises:
        ConfigError: the message names a hook that this version does not have.
    """
    known = {name: make for strategy in STRATEGIES.values() for name, make in strategy.client_hooks.items()}
    for name in names:
        if name not in known:
            raise unknown_name("client hook", name, known)
    return {name: known[name](context) for name in names}
