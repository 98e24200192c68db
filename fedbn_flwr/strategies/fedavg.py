r"""FedAvg: the weighted average of the clients' models, safe for BatchNorm.

McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", Algorithm 1. Every strategy of this package is built on it.

## When

Use when: a reference is needed, with a tuned rate; with a LeNet under Dirichlet(0.1) no
method was found better.

Not when: label skew with few classes a client, few local steps, and BatchNorm in the
model.

## Problem

The data lie with the clients and do not travel. Each client trains the same model on
its own data, and the server averages the results. BatchNorm makes this hard: a running
variance must not become negative, a counter is an integer, and clients with different
data have different statistics.

## Algorithm

Each client of the round trains the global state locally. The server takes the average

$$x = \sum_i p_i x_i, \qquad p_i = \frac{|D_i|}{\sum_j |D_j|}$$

over the clients of the round. $|D_i|$ is `num_examples`, the size of the client's
training set. The sum is taken in float64 and in the order of partition ids, and the
result has the type of the input.

The integer counters of BN are not averaged: they take the maximum. Running variances
$v_i$ are averaged like everything else with `variance="mean"`. With `variance="pooled"`
the spread of the client means $m_i$ is added:

$$v = \sum_i p_i \left( v_i + (m_i - m)^2 \right), \qquad m = \sum_i p_i m_i$$

## Differs from the paper

BN's int64 counters take the maximum. `variance="pooled"` is an option that the paper
does not have.

## Law

The result does not depend on the order in which replies arrive. With one client it is
that client's state.
"""

from __future__ import annotations

from fedbn_flwr.server.methods.method import Method
from fedbn_flwr.server.strategy import Strategy

__all__ = ["FedAvg", "FedAvgMethod"]


class FedAvgMethod(Method):
    """Federated averaging: the average that every round computes, and nothing more."""

    name = "fedavg"
    summary_line = "weighted average of everything, BN counters kept exact"
    source = "McMahan 2017"


class FedAvg(Strategy):
    """Federated averaging."""

    method = FedAvgMethod
