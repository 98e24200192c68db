"""MTFL: gamma and beta stay with the client, BN statistics are shared.

Mills et al. 2022, "Multi-Task Federated Learning for Personalised Deep Neural Networks in Edge Computing" ("yb").

=========  ====================================================================================
sent down  the state without gamma and beta
sent up    the same entries, after local training
kept       gamma and beta, in ``Context.state``
cost       the shared floats down, the same up per client; the whole state once, at the start
=========  ====================================================================================

The kept entries come from the common start, which is sent in a client's first round. Differs from the paper: none
known. Law: a model without BN is trained as by FedAvg, bit for bit.
"""

from __future__ import annotations

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.strategies.fedavg import FedAvg

__all__ = ["MTFL"]


class MTFL(FedAvg):
    """FedAvg in which gamma and beta stay with the client."""

    name = "mtfl"
    summary_line = "gamma and beta stay with the client, BN statistics are shared"
    source = "Mills 2022, arXiv:2007.09236"
    needs_batchnorm = True
    local = frozenset({Part.AFFINE})
