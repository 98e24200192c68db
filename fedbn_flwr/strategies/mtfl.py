r"""MTFL: gamma and beta stay with the client, BN statistics are shared.

Mills et al. 2022, "Multi-Task Federated Learning for Personalised Deep Neural Networks
in Edge Computing", arXiv:2007.09236, the variant "yb".

## When

Use when: each client has its own task or class mix, and gamma and beta should not be
shared because of privacy or size.

Not when: you need one global model.

## Problem

Each client has its own task, and one model serves no client well. Private gamma and beta
personalise the shared network with few numbers.

## Algorithm

Client $i$ has the state $(w, a_i)$: $a_i$ contains gamma and beta of its BN layers, and
$w$ all other entries, including running statistics. The client trains both, and the
server averages only $w$:

$$w = \sum_i p_i w_i, \qquad a_i \text{ stays with client } i$$

The first $a_i$ comes from the common start, which is sent in a client's first round.

## Differs from the paper

None known.

## Law

With one client, the client's model equals the model of FedAvg, bit for bit. A model
without BN is refused.
"""

from __future__ import annotations

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.server.methods.method import Method
from fedbn_flwr.server.methods.phases import Phase
from fedbn_flwr.server.strategy import Strategy


class MTFLMethod(Method):
    """FedAvg that keeps gamma and beta on the client."""

    name = "mtfl"
    summary_line = "gamma and beta stay with the client, BN statistics are shared"
    source = "Mills 2022, arXiv:2007.09236"
    role = "local-part"

    def phases(self) -> tuple[Phase, ...]:
        """Return a phase that keeps gamma and beta on the client."""
        return (Phase(local=frozenset({Part.AFFINE})),)


class MTFL(Strategy):
    """FedAvg that keeps gamma and beta on the client.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import MTFL
        >>> strategy = MTFL()
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> result.arrays["1.weight"] == arrays["1.weight"]  # gamma
        True
    """

    method = MTFLMethod
