r"""SiloBN: BN statistics stay with the client, gamma and beta are shared.

Andreux et al. 2020, "Siloed Federated Learning for Multi-Centric Histopathology
Datasets", arXiv:2008.07424, section 3.

## When

Use when: FedBN fits, but a client has too few examples to learn its own gamma and beta.

Not when: one model must know classes that a client lacks.

## Problem

Hospitals have different scanners, and therefore different statistics in the BN layers.
The average of these statistics fits no hospital. The statistics describe the data of one
client, so they stay there. Gamma and beta are learned, so they are shared.

## Algorithm

Client $i$ has the state $(w, s_i)$: $s_i$ contains running statistics and counters, and
$w$ all other entries, including gamma and beta. The client trains both, and the server
averages only $w$:

$$w = \sum_i p_i w_i, \qquad s_i \text{ stays with client } i$$

The first $s_i$ comes from the common start, which is sent in a client's first round.

## Differs from the paper

None known.

## Law

With one client, the client's model equals the model of FedAvg, bit for bit. A model
without BN is refused.
"""

from __future__ import annotations

from fedbn_flwr.server.methods.method import Method
from fedbn_flwr.server.methods.phases import TRACKED, Phase
from fedbn_flwr.server.strategy import Strategy


class SiloBNMethod(Method):
    """FedAvg that keeps running statistics and counters on the client."""

    name = "silobn"
    summary_line = "BN statistics stay with the client, gamma and beta are shared"
    source = "Andreux 2020, arXiv:2008.07424"
    role = "local-part"

    def phases(self) -> tuple[Phase, ...]:
        """Return a phase that keeps statistics and counters on the client."""
        return (Phase(local=TRACKED),)


class SiloBN(Strategy):
    """FedAvg that keeps running statistics and counters on the client.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import SiloBN
        >>> strategy = SiloBN()
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> result.arrays["1.running_var"] == arrays["1.running_var"]
        True
    """

    method = SiloBNMethod
