"""SiloBN: BN statistics stay with the client, gamma and beta are shared.

Andreux et al. 2020, "Siloed Federated Learning for Multi-Centric Histopathology Datasets", section 3.

=========  ====================================================================================
sent down  the state without running statistics and counters
sent up    the same entries, after local training
kept       running statistics and counters, in ``Context.state``
cost       the shared floats down, the same up per client; the whole state once, at the start
=========  ====================================================================================

The kept entries come from the common start, which is sent in a client's first round. Differs from the paper: none
known. Law: a model without BN is trained as by FedAvg, bit for bit.
"""

from __future__ import annotations

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.strategies.fedavg import FedAvg

__all__ = ["SiloBN"]


class SiloBN(FedAvg):
    """FedAvg in which running statistics and counters stay with the client."""

    name = "silobn"
    summary_line = "BN statistics stay with the client, gamma and beta are shared"
    source = "Andreux 2020, arXiv:2008.07424"
    needs_batchnorm = True
    local = frozenset({Part.STATISTICS, Part.COUNTERS})
