r"""FixBN: FedAvg with BN until round T*, then with BN statistics frozen at their global
values.

Zhong et al. 2023, "Making Batch Normalization Great in Federated Deep Learning",
arXiv:2303.06530, Algorithm 1, B.6.

## When

Use when: label skew with many local steps, or no more messages than FedAvg sends. Lower
the rate after T*.

Not when: the run is so short that the statistics at T* are still far from good.

## Problem

In training a BN layer normalises with the statistics of a client's batch; in the test
it uses the averaged ones. With different data in each client the two do not match, so
the gradients are biased. After some rounds the averaged statistics are good enough to
train with.

## Algorithm

Rounds $1 \dots T^*$ are FedAvg's, with the weights $p_i$. $S(T^*)$ are the global
statistics after round $T^*$. From round $T^* + 1$ on, BN is in eval mode in local
training and normalises with $S(T^*)$:

$$\hat{y} = \gamma \, \frac{y - \mu(T^*)}{\sqrt{\sigma^2(T^*) + \epsilon}} + \beta$$

$S(T^*)$ stays bit-identical to the end and is used in tests. Gamma and beta still
learn, unless `freeze_affine`.

$T^*$ is `freeze_at`. With `freeze_at="auto"` client $m$ sends `delta`, how far its
statistics moved in the round,

$$\delta_m = \frac{\lVert S_m - S \rVert_1}{\text{number of entries}}$$

and the server takes the mean $\sum_m p_m \delta_m$ of each round. It freezes for good
after the first round for which there are at least $W$ means and the last $W$ of them
have a population variance below $\tau$. $W$ is `freeze_window`, $\tau$ is `freeze_tau`.

## The learning rate after the freeze

Lower it after $T^*$. Frozen statistics no longer follow the activations, so a rate that
trains up to $T^*$ may diverge after it. With its decay, `lr-decay-at=freeze`, the
recipe `apps/main/recipes/fixbn.yaml` reaches 92.20 %; without the decay it diverges in
round 32 of 60, with $T^*$ = 30. In the tuned studies (`docs/results/which-method.md`)
FixBN has no decay: it diverges at rate 1.0 on MNIST, and from 0.01 on with
Office-Caltech-10.

## Differs from the paper

The weights are those of eq. (6); Algorithm 1 prints $1/M$, the case of equal sizes. The
rule of the automatic $T^*$ is ours where B.6 is silent: it has a variance for each
client and does not say whose must be small; here it is that of their mean. The paper
asks for a large $W$ and a small $\tau$ and gives neither: $W$ = 100 and $\tau$ = 0.002
are calibrated on MNIST (`docs/results/window-rule.md`). $\delta$ has the scale of the
statistics, so another network may want another $\tau$.

The authors of HBN have a public FixBN as a baseline (Hongyao-Chen/HybridBN at 1c0e151).
It differs: after $T^*$ the whole model is in eval mode, dropout included; BN's counters
are averaged as floats; gradients are clipped to norm 10; a last smaller batch and
clients with less than a batch are left out; the best round is chosen on the test set.

## Law

After $T^*$, with one step, full participation and batches proportional to $|D_i|$, a
round is one centralized step with frozen BN.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import TypeVar, Unpack

from fedbn_flwr.batchnorm.averaging import to_shares
from fedbn_flwr.batchnorm.parts import Part, split_state
from fedbn_flwr.errors import ConfigError, NothingTrainedError
from fedbn_flwr.messages.protocol import FROZEN, Key
from fedbn_flwr.server.methods.method import (
    Ask,
    Facts,
    Method,
    Problem,
    Replies,
    RunSettings,
)
from fedbn_flwr.server.methods.method_params import At, FixBNParams, WindowParams
from fedbn_flwr.server.methods.travels import TRACKED, Beside, PartSet, Travels
from fedbn_flwr.server.strategy import AggregateMetrics, CommonOptions, Strategy
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.training.freezing import hold_eval
from fedbn_flwr.training.modes import refuse_scripted
from fedbn_flwr.training.settings import share_of

__all__ = [
    "FixBN",
    "FixBNMethod",
    "FreezeBN",
    "FreezePlan",
    "FreezingMethod",
    "Frozen",
    "ReportDrift",
    "freeze_plan",
    "freeze_round",
]

logger = logging.getLogger("flwr")

DELTA = Key("statistics-delta", "float: delta_m", "client", "server")
FREEZE_AFFINE = Key(
    "fedbn-flwr.freeze-affine", "bool: gamma and beta", "server", "client"
)


def freeze_round(at: At, num_rounds: int) -> int | None:
    """Return T*: an int unchanged, a fraction as floor(f R), None for "auto"."""
    if isinstance(at, str):
        return None
    return share_of(at, num_rounds) if isinstance(at, float) else at


class FreezeBN(ClientHook):
    """Client half after T*: BN stays in eval mode, also after ``model.train()``;
    ``affine`` freezes gamma and beta.
    """

    def __init__(self, affine: bool) -> None:
        self.affine = affine
        self._undo: list[Callable[[], None]] = []
        self._learning: list[nn.Parameter] = []

    def begin(self, model: nn.Module) -> None:
        """Put the BN layers in eval mode; with ``affine`` also freeze their parameters.

        Raises:
            NormLayerError: TorchScript holds a layer.
        """
        refuse_scripted(model, "frozen BatchNorm")
        layers = [
            module for module in model.modules() if isinstance(module, _BatchNorm)
        ]
        self._undo = [hold_eval(layer) for layer in layers]
        if self.affine:
            # also of parametrizations, which are modules of their own
            affine = frozenset(split_state(model).affine)
            # gamma may be tied to a parameter named before it
            named = model.named_parameters(remove_duplicate=False)
            own = [p for layer in layers for p in layer.parameters(recurse=False)]
            frozen = dict.fromkeys([*own, *(p for name, p in named if name in affine)])
            self._learning = [p for p in frozen if p.requires_grad]
            for parameter in self._learning:
                parameter.requires_grad_(False)

    def end(self, model: nn.Module) -> dict[str, float]:
        """Restore the layers' modes and unfreeze their parameters."""
        for undo in self._undo:
            undo()
        for parameter in self._learning:
            parameter.requires_grad_(True)
        return {}


# --- the automatic round --------------------------------------------------------------
class ReportDrift(ClientHook):
    """Client half of the automatic T*: delta_m = ||statistics after - received||_1 /
    number of entries.
    """

    compares_with_start = True

    def __init__(self) -> None:
        self._received: list[Tensor] = []

    def begin(self, model: nn.Module) -> None:
        """Store the statistics as received.

        Raises:
            NormLayerError: TorchScript holds a layer.
        """
        refuse_scripted(model, "the change of the statistics")
        self._received = [s.clone() for s in _statistics(model)]

    def end(self, model: nn.Module) -> dict[str, float]:
        """Return delta_m, in float64."""
        pairs = list(zip(_statistics(model), self._received, strict=True))
        if not pairs:
            return {}
        drift = torch.stack(
            [(now.double() - before.double()).abs().sum() for now, before in pairs]
        ).sum()
        return {DELTA: float(drift) / sum(s.numel() for s in self._received)}


def _statistics(model: nn.Module) -> list[Tensor]:
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    statistics = [
        s for layer in layers for s in (layer.running_mean, layer.running_var)
    ]
    return [s for s in statistics if s is not None]


def _is_steady(series: Sequence[float], window: int, tau: float) -> bool:
    """Return whether the last ``window`` values, if there are as many, have a
    population variance below ``tau``.
    """
    return len(series) >= window and float(np.var(series[-window:])) < tau


# --- freezing -------------------------------------------------------------------------
W = TypeVar("W", bound=WindowParams, default=WindowParams)


class FreezePlan(NamedTuple):
    """When and what a method freezes: the config key of the round, its value, and the
    parts.
    """

    key: str
    at: At
    parts: PartSet


@dataclass(frozen=True)
class Frozen:
    """The state of a method that freezes.

    Attributes:
        frozen_after: the last round before the statistics are frozen; None while it is
            not known.
        deltas: for an automatic round, the p-weighted mean of delta_m of each round
            until then.
    """

    frozen_after: int | None = None
    deltas: Sequence[float] = ()


class FreezingMethod(Method[W, Frozen]):
    """The common base of FixBN and FedTAN-II: BN statistics are frozen after a fixed or
    an automatic round.
    """

    State = Frozen
    client_hooks = {
        "freeze-bn": lambda context: FreezeBN(bool(context.config[FREEZE_AFFINE])),
        "report-drift": lambda context: ReportDrift(),
    }

    @abstractmethod
    def plan(self) -> FreezePlan:
        """Return when and what the method freezes."""

    @abstractmethod
    def first_phase(self) -> Travels:
        """Return what travels before BN is frozen, beside what an automatic round
        follows.
        """

    def travels(self, num_rounds: int | None = None) -> tuple[Travels, ...]:
        """Return two phases: before and after the freeze."""
        plan, first = self.plan(), self.first_phase()
        if plan.at == "auto":
            why = f"{plan.key}=auto follows delta_m of each client; use a fixed round"
            delta = Beside(DELTA, "scalar", why, read="mean", required=True)
            first = replace(
                first, beside=(delta,), needs=(frozenset({Part.STATISTICS}),)
            )
        last = None if num_rounds is None else freeze_round(plan.at, num_rounds)
        return replace(first, last=last), Travels("frozen", held=plan.parts)

    def begin(self, facts: Facts) -> Frozen:
        """Set the round if it is known; check the window against the number of rounds."""
        plan, window = self.plan(), self.params.freeze_window
        if plan.at == "auto":
            if facts.num_rounds and window >= facts.num_rounds:
                raise ConfigError(
                    f"freeze_window={window} must be below the number of rounds,"
                    f" {facts.num_rounds}, where the round to freeze after is 'auto'."
                    " Use a smaller window, more rounds, or a fixed round."
                )
            return Frozen()
        key = f"{plan.key.replace('-', '_')}={plan.at}"
        rounds = facts.total_rounds(key) if isinstance(plan.at, float) else 0
        return Frozen(freeze_round(plan.at, rounds))

    def phase(self, state: Frozen, number: int) -> str:
        """Return "frozen" after the freeze."""
        frozen = state.frozen_after is not None and number > state.frozen_after
        return "frozen" if frozen else self.first_phase().phase

    def on_clients(self, state: Frozen, facts: Facts) -> list[Ask]:
        """Ask the clients to freeze BN, or to report delta_m while an automatic round
        is not known.

        Raises:
            NothingTrainedError: after T* all global statistics are still those of new
                layers.
        """
        if self.phase(state, facts.number) == "frozen":
            if state.frozen_after and facts.number == state.frozen_after + 1:
                self._refuse_initial(state.frozen_after, facts)
            parts = self.plan().parts
            # FROZEN is not for the hook: the learning rate (lr-decay-at=freeze) follows
            # it.
            config: dict[str, Any] = {FREEZE_AFFINE: Part.AFFINE in parts, FROZEN: True}
            # the frozen entries of the reply show it
            return [Ask("freeze-bn", config, shown=True)]
        return [Ask("report-drift")] if state.frozen_after is None else []

    def _refuse_initial(self, last: int, facts: Facts) -> None:
        held = frozenset(facts.held)
        pairs = [pair for pair in facts.parts.moments() if held.issuperset(pair)]
        if pairs and all(
            (facts.before[mean] == 0).all() and (facts.before[var] == 1).all()
            for mean, var in pairs
        ):
            raise NothingTrainedError(
                f"{self.title} freezes BN after round {last}"
                f" ({self.plan().key}={self.plan().at}), and no round until then has"
                " changed a running statistic: BN would be frozen at mean 0 and"
                " variance 1, as if there were none. If the clients' replies were not"
                " used, the warnings of these rounds say why; use a later"
                f" {self.plan().key}, or a trained initial model."
            )

    def aggregate(
        self, state: Frozen, facts: Facts, replies: Replies, model: dict[str, Any]
    ) -> tuple[dict[str, Any], Frozen]:
        """Restore frozen entries bit for bit; apply the window rule while an automatic
        round is not known.
        """
        if self.phase(state, facts.number) == "frozen":
            self._warn_of_late(facts, replies)
            # the server step of another method may have moved them
            return facts.hold(model), state
        if state.frozen_after is not None:
            return model, state
        deltas = [reply.metrics[DELTA] for reply in replies]
        mean = sum(
            p * delta
            for p, delta in zip(to_shares(replies.weights), deltas, strict=True)
        )
        means, size = [*state.deltas, mean], self.params.freeze_window
        if not _is_steady(means, size, self.params.freeze_tau):
            return model, Frozen(None, means)
        logger.info(
            "BN frozen after round %d: variance of delta over %d rounds under tau",
            facts.number,
            size,
        )
        return model, Frozen(facts.number, means)

    def _warn_of_late(self, facts: Facts, replies: Replies) -> None:
        """Name the clients that keep gamma and beta, and trained for the first time
        after these were frozen.
        """
        late = [reply.node.label for reply in replies if reply.info.began]
        if late and Part.AFFINE in self.plan().parts & facts.travels.local:
            logger.warning(
                "round %d: client %s trained for the first time after %s froze gamma"
                " and beta, which each client keeps: there they have the values of the"
                " initial model, and stay so. Let every client train before the freeze,"
                " or leave out freeze-affine.",
                facts.number,
                ", ".join(late),
                self.title,
            )

    def problems(self, run: RunSettings) -> Iterator[Problem]:
        """Refuse a window as long as the run, and a run that freezes nothing; warn of a
        round outside of the run.
        """
        (key, at, _), rounds = self.plan(), run.num_rounds
        after = freeze_round(at, rounds)
        if at != "auto":
            for name in ("freeze_window", "freeze_tau"):
                yield Problem("fixed-round", f"it is for {key}=auto", "unused", name)
        elif self.params.freeze_window >= rounds:
            text = (
                f"freeze-window={self.params.freeze_window} must be below"
                f" num-server-rounds={rounds} for {key}=auto"
            )
            yield Problem("long-window", text)
        if after is not None and after >= rounds:
            yield Problem(
                "never-frozen",
                f"{self.name}: {key}={at} means after round {after}, and the run has"
                f" {rounds}: BN is never frozen, unless a resumed run goes on. Use a"
                f" smaller {key} or more rounds.",
                "warn",
            )
        if after == 0:
            yield Problem(
                "frozen-from-the-start",
                f"{self.name}: {key}={at} of {rounds} rounds means after round 0: BN is"
                " frozen from round 1 at the statistics of the initial model. Use"
                f" {key} of 1 or more rounds, or a trained initial model.",
                "warn",
            )

    def advice(self, state: Frozen, number: int, known: list[str]) -> list[str]:
        """Name, after the freeze, statistics that are far from those of the batches
        instead of too large steps.
        """
        if self.phase(state, number) != "frozen":
            return known
        cause = (
            "Likely cause: the running statistics, frozen after round"
            f" T*={state.frozen_after}, are far from those of the batches, so BN no"
            " longer keeps the activations small. What helped in small runs: a"
            " learning rate ten times lower from there on (lr-decay-at=freeze, or a"
            " smaller lr-decay-factor where it is set; in a loop of your own, where"
            f" the message's config has {FROZEN}), or from the start (learning-rate). A"
            " later T* alone put the divergence off, but did not prevent it."
        )
        return [cause, *known[1:]]

    def outcome(self, state: Frozen, num_rounds: int) -> dict[str, Any]:
        """Return the round after which BN was frozen; None if no round so far had
        frozen BN.
        """
        frozen = self.phase(state, num_rounds) == "frozen"
        return {"frozen-after": state.frozen_after if frozen else None}


def freeze_plan(methods: Iterable[Method[Any, Any]]) -> FreezePlan | None:
    """Return when and what one of these methods freezes; None if none does."""
    return next(
        (method.plan() for method in methods if isinstance(method, FreezingMethod)),
        None,
    )


class FixBNMethod(FreezingMethod[FixBNParams]):
    """FedAvg that freezes the BN statistics after round T* (``frozen_after``)."""

    name = "fixbn"
    role = "client-hooks"
    summary_line = "BN statistics frozen mid-way, after round T*"
    source = "Zhong 2023, arXiv:2303.06530"
    Params = FixBNParams

    def plan(self) -> FreezePlan:
        """Return T*, and the parts that the settings name."""
        parts = TRACKED | {Part.AFFINE} if self.params.freeze_affine else TRACKED
        return FreezePlan("freeze-at", self.params.freeze_at, parts)

    def first_phase(self) -> Travels:
        """Return FedAvg's."""
        return Travels("train")


class FixBN(Strategy):
    """FedAvg that freezes the BN statistics after round T* (``frozen_after``)."""

    method = FixBNMethod

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        freeze_at: At = 0.5,
        freeze_affine: bool = False,
        freeze_window: int = 100,
        freeze_tau: float = 2e-3,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(
            fraction_train,
            fraction_evaluate,
            min_train_nodes,
            min_evaluate_nodes,
            min_available_nodes,
            weighted_by_key,
            arrayrecord_key,
            configrecord_key,
            train_metrics_aggr_fn,
            evaluate_metrics_aggr_fn,
            freeze_at=freeze_at,
            freeze_affine=freeze_affine,
            freeze_window=freeze_window,
            freeze_tau=freeze_tau,
            **options,
        )
