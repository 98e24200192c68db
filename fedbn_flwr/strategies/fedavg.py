r"""FedAvg: the weighted average of the clients' models, safe for BatchNorm.

McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", Algorithm 1. Every strategy of this package is built on it.

## When

Use when: you need a baseline; tune its learning rate. With a LeNet under Dirichlet(0.1), no
method was found to be better.

Not when: there is label skew with few classes a client and few local steps, and the
model has BatchNorm.

## Problem

The data stay with the clients. Each client trains the same model on its own data, and
the server averages the results. BatchNorm makes this hard: a running variance must not
become negative, a counter is an integer, and clients with different data have different
statistics.

## Algorithm

Each client of the round trains the global state locally. The server takes the average

$$x = \sum_i p_i x_i, \qquad p_i = \frac{|D_i|}{\sum_j |D_j|}$$

over the clients of the round. $|D_i|$ is `num_examples`, the size of the client's
training set. The sum is computed in float64 and in the order of partition ids, and the
result has the type of the input.

The server takes the maximum of BN's integer counters instead of their average. With
`variance="mean"`, running variances $v_i$ are averaged like all other entries. With
`variance="pooled"`, the spread of the client means $m_i$ is added:

$$v = \sum_i p_i \left( v_i + (m_i - m)^2 \right), \qquad m = \sum_i p_i m_i$$

## Differs from the paper

The paper has neither the maximum of BN's int64 counters nor `variance="pooled"`.

## Law

The result does not depend on the order of the replies. With one client, the
result is the state of this client.
"""

from __future__ import annotations

from fedbn_flwr.server.methods.method import Method
from fedbn_flwr.server.strategy import Strategy


class FedAvgMethod(Method):
    """Federated averaging without any change of the average."""

    name = "fedavg"
    summary_line = "weighted average of everything, BN counters kept exact"
    source = "McMahan 2017"


class FedAvg(Strategy):
    """Federated averaging.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedAvg
        >>> strategy = FedAvg(fraction_train=0.7, variance="pooled")
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> result.train_metrics_clientapp[2]["examples-processed"]  # of two sites
        32
    """

    method = FedAvgMethod
