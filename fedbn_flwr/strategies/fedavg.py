r"""FedAvg: the weighted average of the clients' models, safe for BatchNorm.

McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", Algorithm 1. Every
strategy of this package is built on it.

## Problem

The data lie with the clients and do not travel. Each client trains the same model on its own data, and the server
averages the results. BatchNorm makes this hard: a running variance must not become negative, a counter is an integer,
and clients with different data have different statistics.

## Algorithm

Each client of the round trains the global state locally. The server takes the average

$$x = \sum_i p_i x_i, \qquad p_i = \frac{|D_i|}{\sum_j |D_j|}$$

over the clients of the round. $|D_i|$ is `num_examples`, the size of the client's training set. The sum is taken in
float64 and in the order of partition ids, and the result has the type of the input.

The integer counters of BN are not averaged: they take the maximum. Running variances $v_i$ are averaged like
everything else with `variance="mean"`. With `variance="pooled"` the spread of the client means $m_i$ is added:

$$v = \sum_i p_i \left( v_i + (m_i - m)^2 \right), \qquad m = \sum_i p_i m_i$$

## What travels

| | per round |
|---|---|
| sent down | the whole state (a method with local parts: the shared entries; all of them the first time) |
| sent up | the shared entries after local training |
| kept | nothing (a method with local parts: those, in each client's `Context.state`) |
| cost | $F$ floats down (one broadcast), $F$ up per client; $F$ = 271,098 for ResNet-20 |

## Differs from the paper

BN's int64 counters take the maximum. `variance="pooled"` is an option that the paper does not have.

## Law

The result does not depend on the order in which replies arrive. With one client it is that client's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from typing_extensions import TypeVar

from fedbn_flwr.batchnorm.averaging import State, average
from fedbn_flwr.server.common_options import CommonOptions
from fedbn_flwr.server.params import Params
from fedbn_flwr.server.replies import Reply

__all__ = ["FedAvg", "FedAvgParams"]


class FedAvgParams(Params):
    """Parameters of FedAvg: those of every strategy."""


P = TypeVar("P", bound=FedAvgParams, default=FedAvgParams)


class FedAvg(CommonOptions[P]):
    """Federated averaging. Takes Flower's own constructor arguments, and the fields of ``Params`` by name.

    Its bases: ``CommonOptions`` has the options of every method, ``Server`` Flower's calls, ``Method`` the interface
    of a method, Flower's own ``FedAvg`` the arguments.

    ``state_dict()`` is the strategy state to checkpoint with the global model; after ``load_state_dict`` the next
    ``start`` continues from it. A subclass names its additional attributes in ``checkpoint_keys``.

    Args:
        *args: positional arguments of ``flwr.serverapp.strategy.FedAvg`` (``fraction_train``, ...).
        parts: the split of the model's state (``split_state(model)``); by default made from the names of the initial
            arrays.
        on_round_end: called as ``on_round_end(server_round, arrays, metrics)`` at the end of each round, with the model
            that the run would return if it ended there, and the round's metrics by the names of Flower's ``Result``
            (``train_metrics_clientapp``, ...). What it raises ends the run.
        **kwargs: Flower's arguments and the fields of ``Params``.

    Raises:
        ConfigError: an argument is unknown, or a value is out of range.
    """

    name = "fedavg"
    summary_line = "weighted average of everything, BN counters kept exact"
    source = "McMahan 2017"
    Params: ClassVar[type[Any]] = FedAvgParams

    def weights(self, replies: Sequence[Reply]) -> list[float]:
        """Return |D_i| of the replies, in their order; the weights p_i are these, normalised."""
        return [reply.num_examples for reply in replies]

    def combine(self, server_round: int, replies: Sequence[Reply], before: State) -> dict[str, Any]:
        """Return sum p_i x_i of the replies; with ``momentum_scope="global"`` also average their momentum.

        An override calls ``super().combine``; one that averages by itself calls ``average_momentum``.
        """
        self.average_momentum(replies)
        return average([reply.state for reply in replies], self.weights(replies), self.run.parts, self.params.variance)
