"""FedAvg, safe for BatchNorm: the base of every strategy of this package.

McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", Algorithm 1.

=========  =========================================================================================
sent down  the whole state (a method with local parts: the shared entries; all of them the first time)
sent up    the shared entries after local training
kept       nothing (a method with local parts: those, in each client's ``Context.state``)
cost       F floats down (one broadcast), F up per client; F = 271,098 for ResNet-20
=========  =========================================================================================

p_i = ``num_examples`` of client i over the sum of the round's clients. Floating entries: sum p_i x_i in float64, in
the order of partition ids. Differs from the paper: BN's int64 counters take the maximum, and ``variance="pooled"``
may add the spread of the client means to the running variances. Law: the result does not depend on the order in which
replies arrive, and with one client it is that client's state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fedbn_flwr.batchnorm.averaging import State, Variance, average, check_state
from fedbn_flwr.errors import ConfigError, NormLayerError, unknown_name
from fedbn_flwr.batchnorm.parts import Part, Parts
from fedbn_flwr.server.momentum import MOMENTUM, MomentumScope, average_buffers, make_momentum
from fedbn_flwr.server.replies import Reply
from fedbn_flwr.server.flower import Server
from fedbn_flwr.server.shared_bn import SHARED_BN, make_share_bn
from fedbn_flwr.training.loop import ClientHook

__all__ = ["FedAvg", "FedAvgParams", "joined"]


@dataclass(frozen=True, kw_only=True)
class FedAvgParams:
    """What every strategy of this package can be told beside Flower's own arguments.

    Attributes:
        variance: how running variances are averaged, "mean" or "pooled".
        min_replies: usable replies below which a round keeps the previous global model.
        eval_every: client evaluation every so many rounds, and in the last one.
        momentum_scope: what becomes of SGD's momentum between rounds; see ``strategies.momentum``.
        recalibrate: every test and the final model take statistics gathered from the clients; training does not see
            them. See ``strategies.recalibration``.
        eval_on: comma list of tests; "recalibrated" and "averaged-bn" in it are what ``completion`` shall offer.
        seed: of the sampling of nodes.
    """

    variance: Variance = "mean"
    min_replies: int = 1
    eval_every: int = 1
    momentum_scope: MomentumScope = "none"
    recalibrate: bool = False
    eval_on: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        if self.variance not in ("mean", "pooled"):
            raise unknown_name("variance", self.variance, ["mean", "pooled"])
        if self.momentum_scope not in ("none", "local", "global"):
            raise unknown_name("momentum_scope", self.momentum_scope, ["none", "local", "global"])
        for key in ("min_replies", "eval_every"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}={getattr(self, key)} must be at least 1")


class FedAvg(Server):
    """Federated averaging. Takes Flower's own constructor arguments, and the fields of ``Params`` by name.

    ``state_dict()`` is what outlives a round beside the global model; after ``load_state_dict`` the next ``start`` goes
    on from there. A subclass names in ``checkpoint_keys`` the attributes it adds.

    Args:
        *args: positional arguments of ``flwr.serverapp.strategy.FedAvg`` (``fraction_train``, ...).
        parts: the split of the model's state (``split_state(model)``); made from the names of the initial arrays
            where it is not given.
        **kwargs: Flower's arguments and the fields of ``Params``.

    Raises:
        ConfigError: an argument nobody knows, or a value out of range.
    """

    name = "fedavg"
    summary_line = "weighted average of everything, BN counters kept exact"
    source = "McMahan 2017"
    implicit_hooks = frozenset({"share-bn"})  # a client may leave it
    Params: ClassVar[type[FedAvgParams]] = FedAvgParams
    rules: ClassVar[Mapping[str, Callable[[Mapping[str, Any]], ClientHook]]] = {
        "momentum": make_momentum,
        "share-bn": make_share_bn,
    }
    checkpoint_keys: ClassVar[tuple[str, ...]] = ("momentum",)

    def __init__(self, *args: Any, parts: Parts | None = None, **kwargs: Any) -> None:
        super().__init__(*args, parts=parts, **kwargs)
        self.momentum: dict[str, Any] = {}

    def begin(self) -> None:
        """Start without momentum.

        Raises:
            NormLayerError: statistics shall be gathered, and the model has no BatchNorm.
        """
        self.momentum = {}
        asked = self.params.recalibrate or "recalibrated" in self._tests
        if asked and not list(self._known_parts.moments()):
            raise NormLayerError(
                "recalibration gathers BatchNorm's running statistics, and the model has none. Use recalibrate=false "
                "and no eval-on=recalibrated, or a model with BatchNorm."
            )

    @classmethod
    def check_tests(cls, tests: Sequence[str], recalibrate: bool = False) -> None:
        """Refuse what this method has no model for.

        Raises:
            ConfigError: gathered statistics where weights stay with the clients; averaged BN parts where none do.
        """
        bn_parts, weights = cls.local - {Part.REST}, cls.local & {Part.AFFINE, Part.REST}
        if (recalibrate or "recalibrated" in tests) and weights:
            raise ConfigError(
                f"strategy {cls.name!r} keeps {' and '.join(sorted(weights))} with its clients: there are no global "
                "weights under which statistics could be gathered (recalibrate, eval-on=recalibrated)."
            )
        if SHARED_BN in tests and (not bn_parts or Part.REST in weights):
            raise ConfigError(
                f"eval-on={SHARED_BN} completes a global model with the average of BN parts that stay with the "
                f"clients; strategy {cls.name!r} has no such model. It is for fedbn, silobn and mtfl."
            )

    @classmethod
    def exchange_cost(cls, exchanges: str) -> tuple[int, int]:
        """Return what a synchronised BN layer costs beside the model: exchanges, and rows of its channels each way."""
        return 0, 0

    @classmethod
    def extra_copies(cls, momentum_scope: str) -> tuple[int, int]:
        """Return how often the trainable floats travel beside the model: of shared entries, and of all."""
        return int(momentum_scope == "global"), 0

    def phase(self, server_round: int) -> str:
        """Return "train": FedAvg has one phase."""
        return "train"

    def client_config(self, server_round: int) -> dict[str, Any]:
        """Tell the clients what becomes of their momentum, and to share BN parts that a test averages."""
        scope = self.params.momentum_scope
        told = {} if scope == "none" else {"rules": "momentum", "momentum-scope": scope}
        return joined(told, {"rules": "share-bn"}) if SHARED_BN in self._tests else told

    def extras(self, server_round: int) -> Mapping[str, State]:
        """Send the averaged momentum; open a record for shared BN parts."""
        sent: dict[str, State] = {MOMENTUM: self.momentum} if self.params.momentum_scope == "global" else {}
        return {**sent, SHARED_BN: {}} if SHARED_BN in self._tests else sent

    def weights(self, replies: Sequence[Reply]) -> list[float]:
        """Return |D_i| of the replies, in their order; the weights p_i are these, normalised."""
        return [reply.num_examples for reply in replies]

    def check(self, server_round: int, reply: Reply, before: State) -> None:
        """Refuse a reply whose shared BN parts do not fit the model."""
        if shared := reply.extras.get(SHARED_BN):
            local = self._known_parts.select(self.local)
            check_state(shared, {name: before[name] for name in local}, self._known_parts)

    def combine(self, server_round: int, replies: Sequence[Reply], before: State) -> dict[str, Any]:
        """Return sum p_i x_i of the replies; average their momentum where it is global."""
        if self.params.momentum_scope == "global":
            sent = [reply.extras.get(MOMENTUM, {}) for reply in replies]
            self.momentum = average_buffers(sent, self.weights(replies))
        return average(
            [reply.state for reply in replies], self.weights(replies), self._known_parts, self.params.variance
        )


def joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return both messages to the clients as one, the lists of rules joined."""
    rules = ",".join(filter(None, (str(config.get("rules", "")) for config in (first, second))))
    return {**first, **second, "rules": rules}
