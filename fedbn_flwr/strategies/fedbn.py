"""FedBN: BN stays with the client: gamma, beta and running statistics.

Li et al. 2021, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", Algorithm 1.

=========  ====================================================================================
sent down  the state without BN entries
sent up    the same entries, after local training
kept       gamma, beta, running statistics and counters, in ``Context.state``
cost       the shared floats down, the same up per client; the whole state once, at the start
=========  ====================================================================================

The kept entries come from the common start, which is sent in a client's first round. Differs from the paper: none
known. Law: a model without BN is trained as by FedAvg, bit for bit.
"""

from __future__ import annotations

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.strategies.fedavg import FedAvg

__all__ = ["FedBN"]


class FedBN(FedAvg):
    """FedAvg in which gamma, beta, running statistics and counters stay with the client."""

    name = "fedbn"
    summary_line = "BN stays with the client: gamma, beta and running statistics"
    source = "Li 2021, arXiv:2102.07623"
    needs_batchnorm = True
    local = frozenset({Part.AFFINE, Part.STATISTICS, Part.COUNTERS})
