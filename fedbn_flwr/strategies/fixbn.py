"""FixBN: FedAvg with BN until round T*, then with BN statistics frozen at their global values.

Zhong et al. 2023, "Making Batch Normalization Great in Federated Deep Learning", arXiv:2303.06530, Algorithm 1, B.6.

=========  ================================================================================================
sent down  the whole state; from round T* + 1 the word to freeze
sent up    the whole state (the frozen statistics unchanged); with an automatic T*, one number delta_m
kept       nothing; the server keeps S(T*), the statistics after round T*
cost       F floats down, F up per client, as FedAvg
=========  ================================================================================================

T* -> ``freeze_at``; W -> ``freeze_window``; tau -> ``freeze_tau``; Delta BN_m -> ``delta``, the L1 norm of (a client's
statistics after the round - those received) over the number of entries. Rounds 1..T* are FedAvg's, weights p_i (eq.
(6); Algorithm 1 prints 1/M, the case of equal sizes). From round T* + 1 BN is in eval mode in local training with
S(T*), which stays bit-identical to the end and is used in testing; gamma and beta still learn, unless
``freeze_affine``.

Differs from the paper: the automatic T* is ours where B.6 is silent. The server takes the p-weighted mean of the
clients' deltas per round and freezes for good after the first round in which W rounds are there and the population
variance of the last W values is under tau. The paper asks for a large W and a small tau and gives neither: W = 100 and
tau = 0.002 are calibrated on MNIST (``docs/results/README.md``); delta has the scale of the statistics, so another
network may want another tau. Law: after T* with one step, full participation and batches proportional
to |D_i|, a round is one centralized step with frozen BN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from logging import INFO
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.common import log
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.averaging import State, normalise
from fedbn_flwr.errors import ClientPartError, ConfigError, ReplyError
from fedbn_flwr.strategies.fedavg import FedAvg, FedAvgParams, joined
from fedbn_flwr.server.replies import Reply
from fedbn_flwr.training.loop import ClientHook

__all__ = ["FixBN", "FixBNParams", "FreezeBN", "FreezeSettings", "Freezing", "ReportDrift", "freeze_round"]

DELTA = "statistics-delta"


class FreezeSettings(NamedTuple):
    """When BN is frozen, and whether gamma and beta are too: T* or "auto", then W and tau."""

    at: int | float | str
    affine: bool
    window: int
    tau: float


@dataclass(frozen=True, kw_only=True)
class FixBNParams(FedAvgParams):
    """Parameters of FixBN.

    Attributes:
        freeze_at: T*: a round (int), a fraction of all rounds (float in [0, 1], T* = floor(f R)), or "auto".
        freeze_affine: freeze gamma and beta as well (Table H).
        freeze_window: W, rounds in the window of the automatic T*.
        freeze_tau: tau, the variance of delta under which the automatic T* fires.
    """

    freeze_at: int | float | str = 0.5
    freeze_affine: bool = False
    freeze_window: int = 100
    freeze_tau: float = 2e-3

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        at = self.freeze_at
        if isinstance(at, str) and at != "auto":
            raise ConfigError(f"freeze_at={at!r} must be a round (int), a fraction (float in [0, 1]) or 'auto'")
        if isinstance(at, float) and not 0 <= at <= 1:
            raise ConfigError(f"freeze_at={at} must be a fraction in [0, 1]; for a round write an int")
        if isinstance(at, int) and at < 0:
            raise ConfigError(f"freeze_at={at} must be a round >= 0")
        if self.freeze_window < 2:
            raise ConfigError(f"freeze_window={self.freeze_window} must be at least 2 rounds")
        if not self.freeze_tau > 0:
            raise ConfigError(f"freeze_tau={self.freeze_tau} must be above 0")


def freeze_round(freeze_at: int | float | str, num_rounds: int) -> int | None:
    """Return T* where it is known beforehand: an int as it is, a fraction as floor(f R); None for "auto".

    f is taken as the decimal it is written as: floor(0.29 * 100) is 29, not the 28 of binary floating point.
    """
    if isinstance(freeze_at, str):
        return None
    return math.floor(Fraction(str(freeze_at)) * num_rounds) if isinstance(freeze_at, float) else freeze_at


class FreezeBN(ClientHook):
    """Client half after T*: BatchNorm in eval mode while the rest trains, gamma and beta learning or not.

    The layers stay in eval mode when the training calls ``model.train()``.
    """

    def __init__(self, affine: bool) -> None:
        self.affine = affine
        self._modes: dict[nn.Module, bool] = {}
        self._learning: list[nn.Parameter] = []

    def begin(self, model: nn.Module) -> None:
        """Put the BN layers in eval mode; with ``affine`` also stop their parameters from learning."""
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
        """Give the layers their modes back, and let gamma and beta learn again."""
        for layer, mode in self._modes.items():
            del layer.train  # the instance's; the class's is there again
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
        """Remember the statistics as received."""
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


def _freeze(config: Mapping[str, Any]) -> ClientHook:
    return FreezeBN(bool(config["freeze-affine"]))


def _drift(_: Mapping[str, Any]) -> ClientHook:
    return ReportDrift()


class Freezing(FedAvg):
    """What FixBN and FedTAN-II share: BN statistics that stay as they are after a round known or found out.

    Attributes:
        frozen_after: the round after which they are frozen; None until it is known.
        deltas: the p-weighted mean of delta_m, round by round, while it is being looked for.
    """

    needs_batchnorm = True
    rules = {"freeze-bn": _freeze, "report-drift": _drift}
    checkpoint_keys = ("frozen_after", "deltas")

    implicit_hooks = FedAvg.implicit_hooks | {"freeze-bn"}  # by the frozen entries of the reply

    frozen_after: int | None = None
    deltas: list[float]

    def freeze_settings(self) -> FreezeSettings:
        """Return when to freeze, and what."""
        raise NotImplementedError

    def begin(self) -> None:
        """Fix the round where it is known; check the window against the number of rounds."""
        super().begin()
        settings = self.freeze_settings()
        rounds = self.total_rounds if isinstance(settings.at, float) else self.num_rounds or math.inf
        self.deltas = []
        self.frozen_after = freeze_round(settings.at, self.num_rounds or 0)
        if self.frozen_after is None and settings.window >= rounds:
            raise ConfigError(
                f"freeze_window={settings.window} must be below the number of rounds, {rounds}, where the round to "
                "freeze after is 'auto'. Use a smaller window, more rounds, or a fixed round."
            )

    def frozen(self, server_round: int) -> bool:
        """Tell whether this round trains with frozen BN."""
        return self.frozen_after is not None and server_round > self.frozen_after

    def phase(self, server_round: int) -> str:
        """Return "frozen" once BN is, the method's own word before."""
        return "frozen" if self.frozen(server_round) else super().phase(server_round)

    def client_config(self, server_round: int) -> dict[str, Any]:
        """Tell the clients to freeze, or to report delta_m while the round is being looked for."""
        told = super().client_config(server_round)
        if self.frozen(server_round):
            own = {"rules": "freeze-bn", "freeze-affine": self.freeze_settings().affine, "frozen": True}
            return joined(told, own)
        return joined(told, {"rules": "report-drift"}) if self.frozen_after is None else told

    def check(self, server_round: int, reply: Reply, before: State) -> None:
        """Refuse a reply that changed what is frozen, or lacks delta_m while it is needed."""
        super().check(server_round, reply, before)
        if self.frozen_after is None:
            if DELTA not in reply.metrics:
                raise ReplyError(
                    f"metric '{DELTA}' is missing: the client's training must apply the rule 'report-drift'"
                )
            if not 0 <= reply.metrics[DELTA] < math.inf:
                raise ReplyError(f"metric '{DELTA}' is {reply.metrics[DELTA]}, which must be a finite number >= 0")
        if self.frozen(server_round):
            for name in self._frozen_names():
                if not np.array_equal(reply.state[name], before[name]):
                    raise ClientPartError(
                        f"entry '{name}' changed after round {self.frozen_after}, when it was frozen: the client "
                        "trained with BN in train mode. Its training must run inside "
                        '`with bn_rules(model, msg.content["config"]):`.'
                    )

    def combine(self, server_round: int, replies: Sequence[Reply], before: State) -> dict[str, Any]:
        """Average; once frozen, put the frozen entries back bit for bit; look for the round where it is automatic."""
        state = super().combine(server_round, replies, before)
        if self.frozen(server_round):
            state.update({name: before[name] for name in self._frozen_names()})
        elif self.frozen_after is None:
            self._watch(server_round, replies)
        return state

    def _frozen_names(self) -> tuple[str, ...]:
        parts = self._known_parts
        return parts.statistics + parts.counters + (parts.affine if self.freeze_settings().affine else ())

    def _watch(self, server_round: int, replies: Sequence[Reply]) -> None:
        settings, p = self.freeze_settings(), normalise(self.weights(replies))
        self.deltas.append(sum(w * reply.metrics[DELTA] for w, reply in zip(p, replies, strict=True)))
        window = self.deltas[-settings.window :]
        if len(window) == settings.window and float(np.var(window)) < settings.tau:
            self.frozen_after = server_round
            log(INFO, "BN frozen after round %d: variance of delta over %d rounds under tau", server_round, len(window))


class FixBN(Freezing):
    """FedAvg that freezes the BN statistics after round T* (``frozen_after``)."""

    name = "fixbn"
    summary_line = "BN statistics frozen mid-way, after round T*"
    source = "Zhong 2023, arXiv:2303.06530"
    Params = FixBNParams

    def freeze_settings(self) -> FreezeSettings:
        """Return T*, W and tau."""
        params: FixBNParams = self.params
        return FreezeSettings(params.freeze_at, params.freeze_affine, params.freeze_window, params.freeze_tau)
