r"""FedTAN-II: FedTAN for M rounds, then FedAvg with the BN statistics frozen.

Wang, Shi, Chang 2023, "Why Batch Normalization Damage Federated Learning on Non-IID Data?", arXiv:2301.02982, 5.4.

## Problem

FedTAN needs many exchanges in every round. After some rounds the statistics are good, and frozen ones need no exchange.

## Algorithm

Rounds $1 \dots M$ are FedTAN's. From round $M + 1$ on, BN is in eval mode with the statistics after round $M$, and the
round is FedAvg's, as in FixBN with $T^* = M$.

$M$ is `fedtan_rounds`: a number of rounds, a fraction of all, or "auto", FixBN's window rule with $W$ =
`freeze_window` and $\tau$ = `freeze_tau`.

## What travels

| | per round |
|---|---|
| sent down | as FedTAN in rounds $1 \dots M$; then the whole state, and a flag that says that BN is frozen |
| sent up | as FedTAN in rounds $1 \dots M$; then the whole state, the frozen statistics unchanged |
| kept | as FedTAN |
| cost | $M$ rounds cost as FedTAN's, the others as FedAvg's: $F$ floats down, $F$ up per client, one exchange |

## Differs from the paper

As FedTAN. The automatic $M$ is ours. What changes after round 8000 in the paper's runs with momentum is the learning
rate ("$\gamma$ is further reduced to 0.0001"); the momentum stays 0.9: `lr-decay-at=freeze,6000,8000`.

## Law

FedTAN's in rounds $1 \dots M$, FixBN's after $T^* = M$.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.server.params import setting
from fedbn_flwr.strategies.fedtan import FedTAN, FedTANParams
from fedbn_flwr.strategies.fixbn import At, FreezePlan, Freezing, WindowParams, check_at

__all__ = ["FedTAN2", "FedTAN2Params"]


class FedTAN2Params(WindowParams, FedTANParams):
    """Parameters of FedTAN-II."""

    fedtan_rounds: Annotated[At, AfterValidator(check_at)] = setting(
        0.1, "M: a round (int), a fraction of R (float) or `auto`"
    )


class FedTAN2(Freezing[FedTAN2Params], FedTAN[FedTAN2Params]):
    """FedTAN for M rounds, then frozen BN statistics (``frozen_after`` = M)."""

    name = "fedtan2"
    summary_line = "FedTAN for M rounds, then FedAvg with BN statistics frozen"
    source = "Wang 2023, arXiv:2301.02982, 5.4"
    Params = FedTAN2Params

    @classmethod
    def freeze_plan(cls, params: FedTAN2Params) -> FreezePlan:
        """Return M; gamma and beta are not frozen."""
        return FreezePlan("fedtan-rounds", params.fedtan_rounds, frozenset({Part.STATISTICS, Part.COUNTERS}))

    def synchronises_round(self, server_round: int) -> bool:
        """Return whether the round is one of the first M."""
        return not self.frozen(server_round)
