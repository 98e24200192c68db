r"""FixBN: FedAvg with BN until round T*, then with BN statistics frozen at their global values.

Zhong et al. 2023, "Making Batch Normalization Great in Federated Deep Learning", arXiv:2303.06530, Algorithm 1, B.6.

## Problem

In training a BN layer normalises with the statistics of a client's batch; in the test it uses the averaged ones. With
different data in each client the two do not match, so the gradients are biased. After some rounds the averaged
statistics are good enough to train with.

## Algorithm

Rounds $1 \dots T^*$ are FedAvg's, with the weights $p_i$. $S(T^*)$ are the global statistics after round $T^*$. From
round $T^* + 1$ on, BN is in eval mode in local training and normalises with $S(T^*)$:

$$\hat{y} = \gamma \, \frac{y - \mu(T^*)}{\sqrt{\sigma^2(T^*) + \epsilon}} + \beta$$

$S(T^*)$ stays bit-identical to the end and is used in tests. Gamma and beta still learn, unless `freeze_affine`. With
`freeze_statistics=False` and `freeze_affine=True` only gamma and beta are frozen, the paper's control in Table H.

$T^*$ is `freeze_at`. With `freeze_at="auto"` client $m$ sends `delta`, how far its statistics moved in the round,

$$\delta_m = \frac{\lVert S_m - S \rVert_1}{\text{number of entries}}$$

and the server takes the mean $\sum_m p_m \delta_m$ of each round. It freezes for good after the first round
for which there are at least $W$ means and the last $W$ of them have a population variance below $\tau$. $W$ is
`freeze_window`, $\tau$ is `freeze_tau`. With `freeze_rule="clients"` it takes the variance of each client's own last
$W$ values, as B.6 writes it, and freezes when that of every client seen so far is below $\tau$.

## The learning rate after the freeze

Lower it after $T^*$. Frozen statistics no longer follow the activations, so a rate that trains up to $T^*$ may diverge
after it. With its decay, `lr-decay-at=freeze`, the recipe `apps/main/recipes/fixbn.yaml` reaches 92.20 %; without the
decay it diverges in round 32 of 60, with $T^*$ = 30. In the tuned studies (`docs/results/which-method.md`) FixBN has no
decay: it diverges at rate 1.0 on MNIST, and from 0.01 on with Office-Caltech-10.

## What travels

| | per round |
|---|---|
| sent down | the whole state; from round $T^* + 1$ a flag that says that BN is frozen |
| sent up | the whole state (the frozen statistics unchanged); with an automatic $T^*$, one number $\delta_m$ |
| kept | nothing; the server keeps $S(T^*)$, the statistics after round $T^*$ |
| cost | $F$ floats down, $F$ up per client, as FedAvg |

## Differs from the paper

The weights are those of eq. (6); Algorithm 1 prints $1/M$, the case of equal sizes. The rule of the automatic $T^*$ is
ours where B.6 is silent: it has a variance for each client and does not say whose must be small. The paper asks for a
large $W$ and a small $\tau$ and gives neither: $W$ = 100 and $\tau$ = 0.002 are calibrated on MNIST
(`docs/results/README.md`). $\delta$ has the scale of the statistics, so another network may want another $\tau$.

The authors of HBN have a public FixBN as a baseline (Hongyao-Chen/HybridBN at 1c0e151). It differs: after $T^*$ the
whole model is in eval mode, dropout included; BN's counters are averaged as floats; gradients are clipped to norm 10; a
last smaller batch and clients with less than a batch are left out; the best round is chosen on the test set.

## Law

After $T^*$, with one step, full participation and batches proportional to $|D_i|$, a round is one centralized step with
frozen BN.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import AfterValidator
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import TypeVar

from fedbn_flwr.batchnorm.averaging import State, to_shares
from fedbn_flwr.batchnorm.parts import Part, split_state
from fedbn_flwr.errors import ConfigError, ReplyError
from fedbn_flwr.messages.protocol import FROZEN, Key
from fedbn_flwr.server.method import Method, Need, RunSettings
from fedbn_flwr.server.params import setting
from fedbn_flwr.server.replies import Reply, no_batchnorm_hint, refuse_changed
from fedbn_flwr.strategies.fedavg import FedAvg, FedAvgParams
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.training.freezing import hold_eval
from fedbn_flwr.training.scripted import refuse_scripted
from fedbn_flwr.training.settings import share_of

__all__ = [
    "At",
    "FixBN",
    "FixBNParams",
    "FreezeBN",
    "Freezing",
    "ReportDrift",
    "WindowParams",
    "check_at",
    "freeze_round",
]

logger = logging.getLogger("flwr")

DELTA = Key("statistics-delta", "float: delta_m", "client", "server")
FREEZE_STATISTICS = Key(
    "fedbn-flwr.freeze-statistics", "bool: the running statistics; missing = true", "server", "client"
)
FREEZE_AFFINE = Key("fedbn-flwr.freeze-affine", "bool: gamma and beta", "server", "client")

At = int | float | str  # a round, a fraction of all rounds, or "auto"


def check_at(at: At) -> At:
    """Return ``at`` if it is a round >= 0 (int), a fraction in [0, 1] (float) or "auto"; else raise ValueError."""
    if isinstance(at, str) and at != "auto":
        raise ValueError(f"{at!r} is not a round (int), a fraction of the rounds (float in [0, 1]) or 'auto'")
    if isinstance(at, float) and not 0 <= at <= 1:
        raise ValueError(f"{at} is not a fraction in [0, 1]; for a round write an int")
    if isinstance(at, int) and at < 0:
        raise ValueError(f"{at} is not a round; the first is 1, and 0 freezes from the start")
    return at


class WindowParams(FedAvgParams):
    """Parameters of the window rule for an automatic round."""

    freeze_window: int = setting(100, "window W of an automatic round, rounds; must be below R", ge=2)
    freeze_tau: float = setting(2e-3, "threshold tau of an automatic round: the variance of delta", gt=0)
    freeze_rule: Literal["mean", "clients"] = setting(
        "mean", "automatic round: mean = the variance of the clients' mean delta, clients = that of every client's own"
    )


class FixBNParams(WindowParams):
    """Parameters of FixBN."""

    freeze_at: Annotated[At, AfterValidator(check_at)] = setting(
        0.5, "T*: a round (int), a fraction of R (float, T* = floor(f R)) or `auto`"
    )
    freeze_affine: bool = setting(False, "freeze gamma and beta as well (Table H)")
    freeze_statistics: bool = setting(True, "false with freeze-affine = freeze only gamma and beta (Table H)")


def freeze_round(at: At, num_rounds: int) -> int | None:
    """Return T*: an int unchanged, a fraction as floor(f R), None for "auto"."""
    if isinstance(at, str):
        return None
    return share_of(at, num_rounds) if isinstance(at, float) else at


class FreezeBN(ClientHook):
    """Client half after T*: BN stays in eval mode, also after ``model.train()``; ``affine`` freezes gamma and beta.

    Without ``statistics`` BN stays in train mode.
    """

    def __init__(self, affine: bool, statistics: bool = True) -> None:
        self.affine, self.statistics = affine, statistics
        self._undo: list[Callable[[], None]] = []
        self._learning: list[nn.Parameter] = []

    def begin(self, model: nn.Module) -> None:
        """Put the BN layers in eval mode; with ``affine`` also freeze their parameters.

        Raises:
            NormLayerError: TorchScript holds a layer.
        """
        refuse_scripted(model, "frozen BatchNorm")
        layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        self._undo = [hold_eval(layer) for layer in layers if self.statistics]
        if self.affine:
            affine = frozenset(split_state(model).affine)  # also of parametrizations, which are modules of their own
            named = model.named_parameters(remove_duplicate=False)  # gamma may be tied to a parameter named before it
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


# --- the automatic round ----------------------------------------------------------------------------------------------
class ReportDrift(ClientHook):
    """Client half of the automatic T*: delta_m = ||statistics after - received||_1 / number of entries."""

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
        drift = torch.stack([(now.double() - before.double()).abs().sum() for now, before in pairs]).sum()
        return {DELTA: float(drift) / sum(s.numel() for s in self._received)}


def _statistics(model: nn.Module) -> list[Tensor]:
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    statistics = [s for layer in layers for s in (layer.running_mean, layer.running_var)]
    return [s for s in statistics if s is not None]


def _is_steady(series: Sequence[float], window: int, tau: float) -> bool:
    """Return whether the last ``window`` values, if there are as many, have a population variance below ``tau``."""
    return len(series) >= window and float(np.var(series[-window:])) < tau


# --- freezing ---------------------------------------------------------------------------------------------------------
W = TypeVar("W", bound=WindowParams, default=WindowParams)


class FreezePlan(NamedTuple):
    """When and what a method freezes: the config key of the round, its value, and the parts."""

    key: str
    at: At
    parts: frozenset[Part]


class Freezing(FedAvg[W]):
    """The common base of FixBN and FedTAN-II: BN statistics are frozen after a fixed or an automatic round.

    Attributes:
        frozen_after: the last round before the statistics are frozen; None while it is not known.
        deltas: for an automatic round, each round until then: the p-weighted mean of delta_m, or delta_m by client.
    """

    freezes_bn = True
    needs_batchnorm = True
    needs_each_reply = True  # frozen entries must come back bit for bit
    client_hooks = {
        "freeze-bn": lambda context: FreezeBN(
            bool(context.config[FREEZE_AFFINE]), bool(context.config.get(FREEZE_STATISTICS, True))
        ),
        "report-drift": lambda context: ReportDrift(),
    }
    implicit_hooks = FedAvg.implicit_hooks | {"freeze-bn"}  # the frozen entries of the reply show it
    keys: ClassVar[tuple[Key, ...]] = (FREEZE_STATISTICS, FREEZE_AFFINE, DELTA)
    reported_metrics = (DELTA,)
    checkpoint_keys = ("frozen_after", "deltas")

    frozen_after: int | None = None
    deltas: list[Any]

    @classmethod
    @abstractmethod
    def freeze_plan(cls, params: W) -> FreezePlan:
        """Return when and what the method freezes."""

    @classmethod
    def needs(cls, params: W) -> list[Need]:
        """Add the parts that are frozen, and the statistics whose change an automatic round follows."""
        plan = cls.freeze_plan(params)
        followed = {Part.STATISTICS} if plan.at == "auto" else set()
        frozen = [part for part in (Part.STATISTICS, Part.AFFINE) if part in plan.parts | followed]
        who = f"strategy {cls.name!r}"
        return [*super().needs(params), *(Need(who, "FedAvg", frozenset({part})) for part in frozen)]

    @classmethod
    def conflicts(cls, params: W, run: RunSettings) -> list[str]:
        """Refuse a window that is as long as the run or longer, and a run that freezes nothing."""
        problems = super().conflicts(params, run)
        key, at, parts = cls.freeze_plan(params)
        if at == "auto" and params.freeze_window >= run.num_rounds:
            problems.append(
                f"freeze-window={params.freeze_window} must be below num-server-rounds={run.num_rounds} for {key}=auto"
            )
        if not parts:
            problems.append("freeze-statistics=false and freeze-affine=false freeze nothing; use strategy=fedavg")
        return problems

    @classmethod
    def warnings(cls, params: W, run: RunSettings) -> list[str]:
        """Warn of a round T* before the first or after the last round."""
        lines = super().warnings(params, run)
        key, at, _ = cls.freeze_plan(params)
        after = freeze_round(at, run.num_rounds)
        if after is not None and after >= run.num_rounds:
            lines.append(
                f"{cls.name}: {key}={at} means after round {after}, and the run has {run.num_rounds}: BN is never "
                f"frozen, unless a resumed run goes on. Use a smaller {key} or more rounds."
            )
        if after == 0:
            lines.append(
                f"{cls.name}: {key}={at} of {run.num_rounds} rounds means after round 0: BN is frozen from round 1 at "
                f"the statistics of the initial model. Use {key} of 1 or more rounds, or a trained initial model."
            )
        return lines

    @classmethod
    def unused(cls, params: W, run: RunSettings) -> dict[str, str]:
        """Return the settings of the automatic round if the round is fixed."""
        key, at, _ = cls.freeze_plan(params)
        window = () if at == "auto" else ("freeze_window", "freeze_tau", "freeze_rule")
        return super().unused(params, run) | dict.fromkeys(window, f"it is for {key}=auto")

    @classmethod
    def excludes(cls, other: type[Method[Any]]) -> str:
        """Refuse methods whose statistics are not the server's, and a second way to synchronise or freeze them."""
        if Part.STATISTICS in other.local:
            return f"the statistics of {other.name} stay with the clients: there are no global ones to freeze"
        if other.reestimates:
            return f"{other.name} tracks no statistics in training that could be frozen"
        if other.synchronises or other.freezes_bn:
            return "a run has one method that freezes or synchronises the statistics; fedtan2 does both"
        return super().excludes(other)

    def beside_updates(self) -> dict[str, str]:
        """Add the drift that an automatic round follows."""
        plan = self.freeze_plan(self.params)
        texts = super().beside_updates()
        if plan.at == "auto":
            texts["drift"] = f"{plan.key}=auto follows delta_m of each client; use a fixed round"
        return texts

    def begin(self) -> None:
        """Set the round if it is known; check the window against the number of rounds."""
        super().begin()
        plan = self.freeze_plan(self.params)
        # A fraction needs R: total_rounds raises ConfigError where Flower's own loop does not tell it.
        rounds = self.run.total_rounds if isinstance(plan.at, float) else self.run.num_rounds
        self._frozen_parts = plan.parts - self.local  # parts that stay with the clients are frozen there
        self.deltas = []
        self.frozen_after = freeze_round(plan.at, rounds or 0)
        if plan.at == "auto" and rounds and self.params.freeze_window >= rounds:
            raise ConfigError(
                f"freeze_window={self.params.freeze_window} must be below the number of rounds, {rounds}, where "
                "the round to freeze after is 'auto'. Use a smaller window, more rounds, or a fixed round."
            )

    def divergence_advice(self, server_round: int) -> list[str]:
        """Name, after the freeze, statistics that are far from those of the batches instead of too large steps."""
        advice = super().divergence_advice(server_round)
        if not self.frozen(server_round):
            return advice
        cause = (
            f"Likely cause: the running statistics, frozen after round T*={self.frozen_after}, are far from those of "
            "the batches, so BN no longer keeps the activations small. What helped in small runs: a learning rate ten "
            "times lower from there on (lr-decay-at=freeze, or a smaller lr-decay-factor where it is set), or from the "
            "start (learning-rate). A later T* alone put the divergence off, but did not prevent it."
        )
        return [cause, *advice[1:]]

    def outcome(self, num_rounds: int) -> dict[str, Any]:
        """Return the round after which BN was frozen; None if no round so far had frozen BN."""
        return {**super().outcome(num_rounds), "frozen-after": self.frozen_after if self.frozen(num_rounds) else None}

    def frozen(self, server_round: int) -> bool:
        """Return whether this round trains with frozen BN."""
        return self.frozen_after is not None and server_round > self.frozen_after

    def phase(self, server_round: int) -> str:
        """Return "frozen" if BN is frozen, else the method's own phase."""
        return "frozen" if self.frozen(server_round) else super().phase(server_round)

    def hooks_for(self, server_round: int) -> dict[str, dict[str, Any]]:
        """Ask the clients to freeze BN, or to report delta_m while an automatic round is not known."""
        hooks = super().hooks_for(server_round)
        if self.frozen(server_round):
            parts = self.freeze_plan(self.params).parts
            # FROZEN is not for the hook: the learning rate (lr-decay-at=freeze) and DP-SGD follow it.
            entries: dict[str, Any] = {FREEZE_AFFINE: Part.AFFINE in parts, FROZEN: True}
            if Part.STATISTICS not in parts:
                entries[FREEZE_STATISTICS] = False
            return {**hooks, "freeze-bn": entries}
        return {**hooks, "report-drift": {}} if self.frozen_after is None else hooks

    def check(self, server_round: int, reply: Reply, before: State) -> None:
        """Refuse a reply that changed a frozen entry, or that lacks delta_m while it is needed."""
        super().check(server_round, reply, before)
        if self.frozen_after is None:
            if DELTA not in reply.metrics:
                raise ReplyError(
                    f"metric '{DELTA}' is missing: the client's training must apply the client hook 'report-drift'"
                    f"{no_batchnorm_hint(self.run.parts)}"
                )
            if not 0 <= reply.metrics[DELTA] < math.inf:
                raise ReplyError(f"metric '{DELTA}' is {reply.metrics[DELTA]}, which must be a finite number >= 0")
        if self.frozen(server_round):
            why = f"after round {self.frozen_after}, when it was frozen: the client trained with BN in train mode"
            refuse_changed(reply, before, self._frozen_names(), why, self.run.parts)

    def combine(self, server_round: int, replies: Sequence[Reply], before: State) -> dict[str, Any]:
        """Average; restore frozen entries bit for bit; apply the window rule while an automatic round is not known."""
        state = super().combine(server_round, replies, before)
        if self.frozen(server_round):
            state.update({name: before[name] for name in self._frozen_names()})
        elif self.frozen_after is None:
            self._watch(server_round, replies)
        return state

    def _frozen_names(self) -> tuple[str, ...]:
        return self.run.parts.select(self._frozen_parts)

    def _watch(self, server_round: int, replies: Sequence[Reply]) -> None:
        """Note the round's deltas; freeze from the next round on if they are steady."""
        if self.params.freeze_rule == "clients":
            self.deltas.append({reply.node.label: reply.metrics[DELTA] for reply in replies})
            clients = dict.fromkeys(client for row in self.deltas for client in row)
            series = [[row[client] for row in self.deltas if client in row] for client in clients]
        else:
            p = to_shares(self.weights(replies))
            self.deltas.append(sum(w * reply.metrics[DELTA] for w, reply in zip(p, replies, strict=True)))
            series = [self.deltas]
        size = self.params.freeze_window
        if all(_is_steady(one, size, self.params.freeze_tau) for one in series):
            self.frozen_after = server_round
            logger.info("BN frozen after round %d: variance of delta over %d rounds under tau", server_round, size)


class FixBN(Freezing[FixBNParams]):
    """FedAvg that freezes the BN statistics after round T* (``frozen_after``)."""

    name = "fixbn"
    role = "client-hooks"
    summary_line = "BN statistics frozen mid-way, after round T*"
    source = "Zhong 2023, arXiv:2303.06530"
    Params = FixBNParams

    @classmethod
    def freeze_plan(cls, params: FixBNParams) -> FreezePlan:
        """Return T*, and the parts that the settings name."""
        parts = {Part.STATISTICS, Part.COUNTERS} if params.freeze_statistics else set()
        if params.freeze_affine:
            parts.add(Part.AFFINE)
        return FreezePlan("freeze-at", params.freeze_at, frozenset(parts))
