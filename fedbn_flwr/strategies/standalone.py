r"""Standalone: every client trains without the others, and nothing is shared.

This is the lower reference of FedWon (arXiv:2306.05879, "Standalone") and FedTAN
(arXiv:2301.02982, "SingleNet").

## When

Use when: you need a lower reference. A federation must beat it at each client, in the
same test.

Not when: you need a shared model.

## Problem

A federation is useful only if it is better than each client without it. This method
measures the result of a client without the federation.

## Algorithm

Client $i$ keeps its whole state $x_i$ and trains it in every round. The server averages
nothing. The first $x_i$ is the common start, which is sent in a client's first round.

## Differs from the paper

None known.

## Law

A client ends with the state that it would reach without the others.
"""

from __future__ import annotations

from fedbn_flwr.server.methods.method import Method
from fedbn_flwr.server.methods.phases import ALL, Phase
from fedbn_flwr.server.strategy import Strategy


class StandaloneMethod(Method):
    """FedAvg that keeps the whole state on the client."""

    name = "standalone"
    summary_line = "each client trains its own model: nothing is shared"
    source = "reference of arXiv:2306.05879"
    alone = "standalone shares nothing that another method could change"

    def phases(self) -> tuple[Phase, ...]:
        """Return a phase that keeps the whole state on the client."""
        return (Phase(local=ALL),)


class Standalone(Strategy):
    """FedAvg that keeps the whole state on the client.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import Standalone
        >>> strategy = Standalone()
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> result.arrays == arrays
        True
    """

    method = StandaloneMethod
