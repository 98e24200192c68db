r"""FedTAN-II: FedTAN for M rounds, then FedAvg with the BN statistics frozen.

Wang, Shi, Chang 2023, "Why Batch Normalization Damage Federated Learning on Non-IID
Data?", arXiv:2301.02982, 5.4.

## When

Use when: as FedTAN, where its messages can be paid for a part of the rounds only, and
with many local steps.

Not when: the rate cannot be lowered when the statistics freeze.

## Problem

FedTAN needs many exchanges in every round. After some rounds the statistics are good,
and frozen ones need no exchange.

## Algorithm

Rounds $1 \dots M$ are FedTAN's. From round $M + 1$ on, BN is in eval mode with the
statistics after round $M$, and the round is FedAvg's, as in FixBN with $T^* = M$.

$M$ is `fedtan_rounds`: a number of rounds, a fraction of all, or "auto", FixBN's window
rule with $W$ = `freeze_window` and $\tau$ = `freeze_tau`.

## Differs from the paper

As FedTAN. The automatic $M$ is ours. What changes after round 8000 in the paper's runs
with momentum is the learning rate ("$\gamma$ is further reduced to 0.0001"); the
momentum stays 0.9: `lr-decay-at=freeze,6000,8000`.

## Law

FedTAN's in rounds $1 \dots M$, FixBN's after $T^* = M$.
"""

from __future__ import annotations

from collections.abc import Iterator

from fedbn_flwr.server.methods.method import Ask, Facts, Problem, RunSettings
from fedbn_flwr.server.methods.method_params import FedTAN2Params
from fedbn_flwr.server.methods.travels import TRACKED, Travels
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.strategies.fedtan import FedTANMethod
from fedbn_flwr.strategies.fixbn import FreezePlan, FreezingMethod, Frozen

__all__ = [
    "FedTAN2",
    "FedTAN2Method",
]


class FedTAN2Method(FreezingMethod[FedTAN2Params]):
    """FedTAN for M rounds, then frozen BN statistics (``frozen_after`` = M)."""

    name = "fedtan2"
    summary_line = "FedTAN for M rounds, then FedAvg with BN statistics frozen"
    source = "Wang 2023, arXiv:2301.02982, 5.4"
    role = "client-hooks"
    Params = FedTAN2Params
    client_hooks = {**FreezingMethod.client_hooks, **FedTANMethod.client_hooks}

    def __init__(self, params: FedTAN2Params) -> None:
        super().__init__(params)
        self._fedtan = FedTANMethod(params)

    def plan(self) -> FreezePlan:
        """Return M; gamma and beta are not frozen."""
        return FreezePlan("fedtan-rounds", self.params.fedtan_rounds, TRACKED)

    def first_phase(self) -> Travels:
        """Return FedTAN's."""
        return self._fedtan.travels()[0]

    def on_clients(self, state: Frozen, facts: Facts) -> list[Ask]:
        """Ask for FedTAN's step in the first M rounds, and for what FixBN asks."""
        first = self.phase(state, facts.number) != "frozen"
        return [
            *(self._fedtan.on_clients(None, facts) if first else []),
            *super().on_clients(state, facts),
        ]

    def problems(self, run: RunSettings) -> Iterator[Problem]:
        """Yield the problems of both."""
        yield from self._fedtan.problems(run)
        yield from super().problems(run)


class FedTAN2(Strategy):
    """FedTAN for M rounds, then frozen BN statistics (``frozen_after`` = M)."""

    method = FedTAN2Method
