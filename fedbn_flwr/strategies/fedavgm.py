r"""FedAvgM: momentum on the server, safe for BatchNorm.

Hsu, Qi, Brown 2019, "Measuring the Effects of Non-Identical Data Distribution for
Federated Visual Classification", arXiv:1909.06335, section 3.3.

## When

Use when: the model zigzags from round to round, and more messages are not possible.

Not when: BatchNorm causes the problem. Its statistics are averaged as in FedAvg.

## Problem

With different data in each client, the average moves in a different direction in each
round. Momentum on the server smooths these steps.

## Algorithm

$\Delta$ is the average of the replies minus the state before the round (the paper's
$-\Delta w$). The server keeps the velocity $v$, which starts at 0:

$$v \leftarrow \beta v + \Delta, \qquad w \leftarrow w + \gamma v$$

$\beta$ is `server_momentum`. $\gamma$ is `server_learning_rate` (the paper: 1).

## Differs from the paper

The paper has no BatchNorm. Here the velocity updates gamma, beta and the other
parameters. Buffers, such as running statistics, are averaged as in FedAvg, with
FedAdam's rule.

## Law

On a model without BN, the numbers equal the numbers of Flower's FedAvgM. Without
momentum and with rate 1, they equal FedAvg. Both laws are exact up to rounding.
"""

from __future__ import annotations

import numpy as np

from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.problems import Problem
from fedbn_flwr.server.methods.params import Params, setting
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.strategies.fedopt import SERVER_RATE, Moments, ServerStep


class FedAvgMParams(Params):
    """Parameters of FedAvgM."""

    server_learning_rate: float = setting(1.0, SERVER_RATE, gt=0)
    server_momentum: float = setting(
        0.0, "beta, the server's momentum", in_config=0.9, ge=0, lt=1
    )


class FedAvgMMethod(ServerStep[FedAvgMParams]):
    """FedAvg with momentum on the server."""

    name = "fedavgm"
    summary_line = "FedAvg with momentum on the server; BN statistics averaged"
    source = "Hsu 2019, arXiv:1909.06335"
    Params = FedAvgMParams
    server_rate = "server_learning_rate"

    def step(
        self, number: int, delta: Array, moments: Moments
    ) -> tuple[Array, Moments]:
        """Return the step rate * v, and the new moment v = beta v + Delta."""
        (v,) = moments or (0.0,)
        v = self.params.server_momentum * v + delta
        return np.asarray(self.params.server_learning_rate * v), (v,)


class FedAvgM(Strategy):
    """FedAvg with momentum on the server.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedAvgM
        >>> strategy = FedAvgM(server_momentum=0.9)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> int(result.arrays["1.num_batches_tracked"].numpy())  # no step
        4
    """

    method = FedAvgMMethod


# --- what may be wrong ----------------------------------------------------------------
FedAvgMMethod.checks = (
    *ServerStep.checks,
    Problem(
        "no-server-step",
        "{method.title}: with server-momentum=0 and server-learning-rate=1, the defaults in"
        " Flower, the server averages as in fedavg. Use a server-momentum above 0, such"
        " as 0.9.",
        "server_momentum server_learning_rate",
        effect="warn",
        when=lambda method, known: (
            method.params.server_momentum == 0
            and method.params.server_learning_rate == 1
        ),
    ),
)
