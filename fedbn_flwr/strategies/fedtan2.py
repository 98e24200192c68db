r"""FedTAN-II: FedTAN for M rounds, then FedAvg with the BN statistics frozen.

Wang, Shi, Chang 2023, "Why Batch Normalization Damage Federated Learning on Non-IID
Data?", arXiv:2301.02982, 5.4.

## When

Use when: FedTAN fits, but its messages are affordable only in some of the rounds, or
there are many local steps.

Not when: the rate cannot be lowered when the statistics freeze.

## Problem

FedTAN needs many exchanges in every round. After some rounds the statistics are good,
and frozen statistics need no exchange.

## Algorithm

Rounds $1 \dots M$ are rounds of FedTAN. From round $M + 1$, BN is in eval mode with the
statistics after round $M$, and the round is a round of FedAvg, as in FixBN with
$T^* = M$.

$M$ is `fedtan_rounds`: a number of rounds, a fraction of all, or "auto", FixBN's window
rule with $W$ = `freeze_window` and $\tau$ = `freeze_tau`.

## Differs from the paper

The differences of FedTAN apply. The automatic $M$ is ours. In the paper's runs with
momentum, the learning rate changes after round 8000 ("$\gamma$ is further reduced to
0.0001"), and the momentum stays 0.9: use `lr-decay-at=freeze,6000,8000`.

## Law

The law of FedTAN applies in rounds $1 \dots M$, and the law of FixBN after $T^* = M$.
"""

from __future__ import annotations

from typing import ClassVar

from fedbn_flwr.server.methods.method import Ask, Facts
from fedbn_flwr.server.methods.params import setting
from fedbn_flwr.server.methods.phases import Phase
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.strategies.fedtan import FedTANMethod, FedTANParams
from fedbn_flwr.strategies.fixbn import At, FixBNMethod, Frozen, WindowParams


class FedTAN2Params(WindowParams, FedTANParams):
    """Parameters of FedTAN-II."""

    fedtan_rounds: At = setting(
        0.1, "M: a round (int), a fraction of R (float) or `auto`"
    )

    # FedTAN-II freezes as FixBN does, and FixBN reads its settings under these names.
    freeze_affine: ClassVar[bool] = False

    @property
    def freeze_at(self) -> At:
        """M, the round after which BN is frozen."""
        return self.fedtan_rounds


class FedTAN2Method(FixBNMethod):
    """FedTAN for M rounds, then frozen BN statistics (``frozen_after`` = M)."""

    name = "fedtan2"
    summary_line = "FedTAN for M rounds, then FedAvg with BN statistics frozen"
    source = "Wang 2023, arXiv:2301.02982, 5.4"
    Params = FedTAN2Params
    key = "fedtan-rounds"
    client_hooks = {**FixBNMethod.client_hooks, **FedTANMethod.client_hooks}

    def __init__(self, params: FedTAN2Params) -> None:
        super().__init__(params)
        self._fedtan = FedTANMethod(params)

    def first_phase(self) -> Phase:
        """Return the phase of FedTAN."""
        return self._fedtan.phases()[0]

    def on_clients(self, state: Frozen, facts: Facts) -> list[Ask]:
        """Ask for the hooks of FixBN, and for FedTAN's step in the first M rounds."""
        # FixBN asks for the freeze, or for delta_m while an automatic M is not known.
        asks = super().on_clients(state, facts)
        if self.phase_name(state, facts.number) != "frozen":
            asks = [*self._fedtan.on_clients(None, facts), *asks]
        return asks


class FedTAN2(Strategy):
    """FedTAN for M rounds, then frozen BN statistics (``frozen_after`` = M).

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedTAN2
        >>> strategy = FedTAN2(fedtan_rounds=1)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> int(result.arrays["1.num_batches_tracked"].numpy())  # of round 1
        2
    """

    method = FedTAN2Method
