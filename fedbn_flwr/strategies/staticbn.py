r"""StaticBN: train on batch statistics and re-estimate the statistics before a test.

Diao, Ding, Tarokh 2021, "HeteroFL: Computation and Communication Efficient Federated
Learning for Heterogeneous Clients", arXiv:2010.01264, "static Batch Normalization"
(sBN).

## When

Use when: only the running statistics of the final model are wrong, and all clients can
answer once more before a test.

Not when: batch statistics bias the training itself, as under label skew with few local
steps.

## Problem

Running statistics are collected while the weights still change, and each client
collects its own. Their average fits neither the final weights nor the union of the
data. Here no client tracks statistics in training. The server computes them when a test
needs them.

## Algorithm

Local training normalises with the statistics of the batch and does not change the
received running statistics. The server averages as in FedAvg. Before a test, every
client passes its data once through the new global model in train mode. It sends, for
each BN layer and channel, the count $n_i$, the mean $m_i$ and the sum of squared
deviations $M_i$. The server merges the moments of all clients:

$$n = \sum_i n_i, \qquad m = \sum_i \frac{n_i}{n} m_i, \qquad M = \sum_i \left( M_i + n_i (m_i - m)^2 \right)$$

The running mean is $m$ and the running variance $M / (n - 1)$. Training keeps the
initial statistics. The tested model and the final model contain the re-estimated
statistics.

## Differs from the paper

The paper averages batch means and variances. Here the moments of all clients are merged
exactly (`server/rounds/recalibration.py`), with torch's factor $n/(n-1)$ for the
variance. The paper's alternative, inference on batch statistics, is
`eval-on=global-test-bn` with `test-bn=batch`.

## Law

The statistics of the first BN layer equal one pass over the union of the data.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack

from torch import nn

from fedbn_flwr.batchnorm.layers import batchnorm_layers, layers_in_training
from fedbn_flwr.server.methods.method import Ask, Facts, Method
from fedbn_flwr.server.methods.phases import TRACKED, Phase
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.training.layer_calls import replace_attribute


class Untracked(ClientHook):
    """Client code that lets BN use the batch's statistics in training.

    The running statistics do not change. ``paths`` are the paths of the layers; an
    empty collection means all layers.
    """

    in_batchnorm = True

    def __init__(self, paths: Collection[str] = ()) -> None:
        self.paths = paths
        self._undo = ExitStack()

    def begin(self, model: nn.Module) -> None:
        """Switch tracking off."""
        # Layers that the model keeps in eval mode track nothing, so they are not
        # changed.
        training, chosen = (
            layers_in_training(model),
            batchnorm_layers(model, self.paths),
        )
        for layer in training.values():
            if layer in chosen:
                undo = replace_attribute(layer, "track_running_stats", False)
                self._undo.callback(undo)

    def end(self, model: nn.Module) -> dict[str, float]:
        """Switch tracking on again."""
        self._undo.close()
        return {}


class StaticBNMethod(Method):
    """FedAvg that trains without running statistics and re-estimates them for tests."""

    name = "staticbn"
    summary_line = (
        "trains on batch statistics; BN statistics re-estimated from all clients before"
        " a test"
    )
    source = "Diao 2021, arXiv:2010.01264"
    role = "client-hooks"
    client_hooks = {"untracked-statistics": lambda context: Untracked(context.layers)}

    def phases(self) -> tuple[Phase, ...]:
        """Return a phase with frozen statistics that are re-estimated."""
        return (Phase(frozen=TRACKED, reestimates="global"),)

    def on_clients(self, state: None, facts: Facts) -> list[Ask]:
        """Ask the clients not to track statistics.

        The statistics in the reply show whether a client applied the hook.
        """
        return [Ask("untracked-statistics", unnamed=True, tunes=True)]


class StaticBN(Strategy):
    """FedAvg that trains without running statistics and re-estimates them for tests.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import StaticBN
        >>> strategy = StaticBN()
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> int(result.arrays["1.num_batches_tracked"].numpy())
        0
    """

    method = StaticBNMethod
