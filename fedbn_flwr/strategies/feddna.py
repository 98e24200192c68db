"""FedDNA: FedTAN's forward half only; statistics are global, gradients through them each client's own.

The baseline "FedAvg + Algorithm 2" of Wang 2023, arXiv:2301.02982, 6.1.3, after Duan et al. 2021, "FedDNA: Federated
Learning with Decoupled Normalization-Layer Aggregation for Non-IID Data".

=========  ================================================================================================
sent down  the whole state; then, per BN layer, the global mean and variance
sent up    per BN layer the local ones; at the end the whole state
kept       nothing
cost       per round F + S floats down and up per client in 2L + 1 exchanges, or F + 1.5 S in L + 1
=========  ================================================================================================

Differs from the paper: as FedTAN; the gradients with respect to the statistics are not detached, but the client's own
dF_i/dvar and dF_i/dmean take the place of the sums. Law: none; its first step is not the centralized one.
"""

from __future__ import annotations

from fedbn_flwr.strategies.fedtan import FedTAN

__all__ = ["FedDNA"]


class FedDNA(FedTAN):
    """FedTAN without the exchange of gradients."""

    name = "feddna"
    summary_line = "FedTAN's forward half only: global statistics, own gradients through them"
    source = "Duan 2021; arXiv:2301.02982, 6.1.3"
    backward = "own"
