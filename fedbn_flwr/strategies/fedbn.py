r"""FedBN: gamma, beta and running statistics of BN stay with the client.

Li et al. 2021, "FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization", arXiv:2102.07623, Algorithm 1.

## When

Use when: clients have the same classes but different cameras, scanners or styles, and
each client uses its own model.

Not when: one model must know classes that a client lacks, or most clients never train.

## Problem

If the clients have different features, such as other cameras, scanners or styles, one
set of BN parameters and statistics does not fit all clients.

## Algorithm

Client $i$ has the state $(w, b_i)$: $b_i$ contains gamma, beta, running statistics and
counters of its BN layers, and $w$ all other entries. The client trains both, and the
server averages only $w$:

$$w = \sum_i p_i w_i, \qquad b_i \text{ stays with client } i$$

The personalised model of client $i$ is $(w, b_i)$. The first $b_i$ comes from the
common start, which is sent in a client's first round.

## Differs from the paper

Algorithm 1 and the authors' code (med-air/FedBN) give each of $K$ clients the weight
$1/K$. This equals $p_i$ if all clients have the same number of examples, as in the
paper's experiments on digits.

## Law

With one client, the client's model equals the model of FedAvg, bit for bit. A model
without BN is refused.
"""

from __future__ import annotations

from fedbn_flwr.server.methods.method import Method
from fedbn_flwr.server.methods.phases import BATCHNORM, Phase
from fedbn_flwr.server.strategy import Strategy


class FedBNMethod(Method):
    """FedAvg that keeps the whole of BN on the client."""

    name = "fedbn"
    summary_line = "BN stays with the client: gamma, beta and running statistics"
    source = "Li 2021, arXiv:2102.07623"
    role = "local-part"

    def phases(self) -> tuple[Phase, ...]:
        """Return a phase that keeps BN on the client."""
        return (Phase(local=BATCHNORM),)


class FedBN(Strategy):
    """FedAvg that keeps the whole of BN on the client.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedBN
        >>> strategy = FedBN(eval_on="averaged-bn")
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> int(result.arrays["1.num_batches_tracked"].numpy())  # the average
        4
    """

    method = FedBNMethod
