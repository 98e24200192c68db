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

$S(T^*)$ stays bit-identical to the end and is used in tests. Gamma and beta still learn, unless `freeze_affine`.

$T^*$ is `freeze_at`. With `freeze_at="auto"` client $m$ sends `delta`, how far its statistics moved in the round,

$$\delta_m = \frac{\lVert S_m - S \rVert_1}{\text{number of entries}}$$

and the server takes the mean $\sum_m p_m \delta_m$ of each round. It freezes for good after the first round
for which there are at least $W$ means and the last $W$ of them have a population variance below $\tau$. $W$ is
`freeze_window`, $\tau$ is `freeze_tau`.

## What travels

| | per round |
|---|---|
| sent down | the whole state; from round $T^* + 1$ the word to freeze |
| sent up | the whole state (the frozen statistics unchanged); with an automatic $T^*$, one number $\delta_m$ |
| kept | nothing; the server keeps $S(T^*)$, the statistics after round $T^*$ |
| cost | $F$ floats down, $F$ up per client, as FedAvg |

## Differs from the paper

The weights are those of eq. (6); Algorithm 1 prints $1/M$, the case of equal sizes. The rule of the automatic $T^*$ is
ours where B.6 is silent. The paper asks for a large $W$ and a small $\tau$ and gives neither: $W$ = 100 and $\tau$ =
0.002 are calibrated on MNIST (`docs/results/README.md`). $\delta$ has the scale of the statistics, so another network
may want another $\tau$.

## Law

After $T^*$, with one step, full participation and batches proportional to $|D_i|$, a round is one centralized step with
frozen BN.
"""

from __future__ import annotations

import functools
import logging
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import AfterValidator
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import TypeVar

from fedbn_flwr.batchnorm.averaging import State, normalise
from fedbn_flwr.errors import ClientPartError, ConfigError, ReplyError
from fedbn_flwr.messages.protocol import FROZEN, Key
from fedbn_flwr.server.method import RunSettings, setting
from fedbn_flwr.server.replies import Reply
from fedbn_flwr.strategies.fedavg import FedAvg, FedAvgParams
from fedbn_flwr.training.loop import ClientHook
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
AFFINE = Key("freeze-affine", "bool: gamma and beta too", "server", "client")

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


class FixBNParams(WindowParams):
    """Parameters of FixBN."""

    freeze_at: Annotated[At, AfterValidator(check_at)] = setting(
        0.5, "T*: a round (int), a fraction of R (float, T* = floor(f R)) or `auto`"
    )
    freeze_affine: bool = setting(False, "freeze gamma and beta as well (Table H)")


def freeze_round(at: At, num_rounds: int) -> int | None:
    """Return T*: an int unchanged, a fraction as floor(f R), None for "auto"."""
    if isinstance(at, str):
        return None
    return share_of(at, num_rounds) if isinstance(at, float) else at


class FreezeBN(ClientHook):
    """Client half after T*: BN stays in eval mode, also after ``model.train()``; ``affine`` freezes gamma and beta."""

    def __init__(self, affine: bool) -> None:
        self.affine = affine
        self._modes: dict[nn.Module, bool] = {}
        self._learning: list[nn.Parameter] = []

    def begin(self, model: nn.Module) -> None:
        """Put the BN layers in eval mode; with ``affine`` also freeze their parameters."""
        layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        self._modes = {layer: layer.training for layer in layers}
        for layer in layers:
            layer.eval()
            layer.train = functools.partial(_stay, layer)  # type: ignore[method-assign, assignment]
        if self.affine:
            self._learning = [p for layer in layers for p in layer.parameters(recurse=False) if p.requires_grad]
            for parameter in self._learning:
                parameter.requires_grad_(False)

    def end(self, model: nn.Module) -> dict[str, float]:
        """Restore the layers' modes and unfreeze their parameters."""
        for layer, mode in self._modes.items():
            del layer.train  # the instance attribute; the class's method is used again
            layer.train(mode)
        for parameter in self._learning:
            parameter.requires_grad_(True)
        return {}


def _stay(layer: nn.Module, mode: bool = True) -> nn.Module:
    return layer


class ReportDrift(ClientHook):
    """Client half of the automatic T*: delta_m = ||statistics after - received||_1 / number of entries."""

    def __init__(self) -> None:
        self._received: list[Tensor] = []

    def begin(self, model: nn.Module) -> None:
        """Store the statistics as received."""
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
    pairs = [s for layer in layers for s in (layer.running_mean, layer.running_var)]
    return [s for s in pairs if s is not None]


W = TypeVar("W", bound=WindowParams, default=WindowParams)


class Freezing(FedAvg[W]):
    """The common base of FixBN and FedTAN-II: BN statistics are frozen after a fixed or an automatic round.

    Attributes:
        frozen_after: the last round before the statistics are frozen; None while it is not known.
        deltas: the p-weighted mean of delta_m in each round until then, for an automatic round.
    """

    needs_batchnorm = True
    client_hooks = {
        "freeze-bn": lambda context: FreezeBN(bool(context.config[AFFINE])),
        "report-drift": lambda context: ReportDrift(),
    }
    implicit_hooks = FedAvg.implicit_hooks | {"freeze-bn"}  # the frozen entries of the reply show it
    keys = (AFFINE, DELTA)
    checkpoint_keys = ("frozen_after", "deltas")

    frozen_after: int | None = None
    deltas: list[float]

    @classmethod
    @abstractmethod
    def freezes(cls, params: W) -> tuple[str, At, bool]:
        """Return the config key of the freeze round, its value, and whether gamma and beta are frozen too."""

    @classmethod
    def conflicts(cls, params: W, run: RunSettings) -> list[str]:
        """Refuse a window that is as long as the run or longer."""
        found, (key, at, _) = super().conflicts(params, run), cls.freezes(params)
        if at == "auto" and params.freeze_window >= run.num_rounds:
            found.append(
                f"freeze-window={params.freeze_window} must be below num-server-rounds={run.num_rounds} for {key}=auto"
            )
        return found

    def begin(self) -> None:
        """Set the round if it is known; check the window against the number of rounds."""
        super().begin()
        _, at, self._affine = self.freezes(self.params)
        num_rounds = self.run.total_rounds if isinstance(at, float) else self.run.num_rounds or math.inf
        self.deltas = []
        self.frozen_after = freeze_round(at, self.run.num_rounds or 0)
        if self.frozen_after is None and self.params.freeze_window >= num_rounds:
            raise ConfigError(
                f"freeze_window={self.params.freeze_window} must be below the number of rounds, {num_rounds}, where "
                "the round to freeze after is 'auto'. Use a smaller window, more rounds, or a fixed round."
            )

    def outcome(self) -> dict[str, Any]:
        """Return the round after which BN was frozen, once it is known."""
        return {} if self.frozen_after is None else {"frozen-after": self.frozen_after}

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
            return {**hooks, "freeze-bn": {AFFINE: self._affine, FROZEN: True}}
        return {**hooks, "report-drift": {}} if self.frozen_after is None else hooks

    def check(self, server_round: int, reply: Reply, before: State) -> None:
        """Refuse a reply that changed a frozen entry, or that lacks delta_m while it is needed."""
        super().check(server_round, reply, before)
        if self.frozen_after is None:
            if DELTA not in reply.metrics:
                raise ReplyError(
                    f"metric '{DELTA}' is missing: the client's training must apply the client hook 'report-drift'"
                )
            if not 0 <= reply.metrics[DELTA] < math.inf:
                raise ReplyError(f"metric '{DELTA}' is {reply.metrics[DELTA]}, which must be a finite number >= 0")
        if self.frozen(server_round):
            for name in self._frozen_names():
                if not np.array_equal(reply.state[name], before[name]):
                    raise ClientPartError(
                        f"entry '{name}' changed after round {self.frozen_after}, when it was frozen: the client "
                        "trained with BN in train mode. Run its training inside `with bn_rules(model, msg, context):`."
                    )

    def combine(self, server_round: int, replies: Sequence[Reply], before: State) -> dict[str, Any]:
        """Average; restore frozen entries bit for bit; apply the window rule while an automatic round is not known."""
        state = super().combine(server_round, replies, before)
        if self.frozen(server_round):
            state.update({name: before[name] for name in self._frozen_names()})
        elif self.frozen_after is None:
            self._watch(server_round, replies)
        return state

    def _frozen_names(self) -> tuple[str, ...]:
        parts = self.run.parts
        return parts.statistics + parts.counters + (parts.affine if self._affine else ())

    def _watch(self, server_round: int, replies: Sequence[Reply]) -> None:
        p = normalise(self.weights(replies))
        self.deltas.append(sum(w * reply.metrics[DELTA] for w, reply in zip(p, replies, strict=True)))
        window = self.deltas[-self.params.freeze_window :]
        if len(window) == self.params.freeze_window and float(np.var(window)) < self.params.freeze_tau:
            self.frozen_after = server_round
            logger.info(
                "BN frozen after round %d: variance of delta over %d rounds under tau", server_round, len(window)
            )


class FixBN(Freezing[FixBNParams]):
    """FedAvg that freezes the BN statistics after round T* (``frozen_after``)."""

    name = "fixbn"
    summary_line = "BN statistics frozen mid-way, after round T*"
    source = "Zhong 2023, arXiv:2303.06530"
    Params = FixBNParams

    @classmethod
    def freezes(cls, params: FixBNParams) -> tuple[str, At, bool]:
        """Return T*, and whether gamma and beta are frozen too."""
        return "freeze-at", params.freeze_at, params.freeze_affine
