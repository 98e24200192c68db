r"""MTFL: gamma and beta stay with the client, BN statistics are shared.

Mills et al. 2022, "Multi-Task Federated Learning for Personalised Deep Neural Networks
in Edge Computing", arXiv:2007.09236, the variant "yb".

## When

Use when: each client has a task or class mix of its own, and privacy or size speaks
against sharing gamma and beta.

Not when: one global model is wanted.

## Problem

Each client has a task of its own, and one model serves none of them well. Private gamma
and beta make the shared network a personal one, at the price of few numbers.

## Algorithm

Client $i$ has the state $(w, a_i)$: $a_i$ holds gamma and beta of its BN layers, $w$
all other entries, running statistics included. It trains both, and the server averages
only $w$:

$$w = \sum_i p_i w_i, \qquad a_i \text{ stays with client } i$$

The first $a_i$ comes from the common start, which is sent in a client's first round.

## Differs from the paper

None known.

## Law

With one client the client's model is FedAvg's, bit for bit. A model without BN is
refused.
"""

from __future__ import annotations

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.server.methods.method import Method
from fedbn_flwr.server.methods.travels import Travels
from fedbn_flwr.server.strategy import Strategy

__all__ = ["MTFL", "MTFLMethod"]


class MTFLMethod(Method):
    """FedAvg in which gamma and beta stay with the client."""

    name = "mtfl"
    summary_line = "gamma and beta stay with the client, BN statistics are shared"
    source = "Mills 2022, arXiv:2007.09236"
    role = "local-part"

    def travels(self, num_rounds: int | None = None) -> tuple[Travels, ...]:
        """Return what stays with the client."""
        return (Travels(local=frozenset({Part.AFFINE})),)


class MTFL(Strategy):
    """FedAvg in which gamma and beta stay with the client."""

    method = MTFLMethod
