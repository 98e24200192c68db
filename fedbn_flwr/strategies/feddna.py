r"""FedDNA: the forward half of FedTAN, with each client's own gradients.

The baseline "FedAvg + Algorithm 2" of Wang 2023, arXiv:2301.02982, 6.1.3, after Duan et
al. 2021, "FedDNA: Federated Learning with Decoupled Normalization-Layer Aggregation for
Non-IID Data".

## When

Use when: you measure the part of FedTAN's gain that the forward half gives.

Not when: you need accuracy under label skew, because FedTAN was better in every setting.

## Problem

The method shows how much of FedTAN's gain comes only from the global statistics. It
saves the exchanges of the backward pass.

## Algorithm

The first local step of each round has the forward pass of FedTAN: every BN layer
normalises with

$$\mu = \sum_i p_i \mu_i, \qquad \sigma^2 = \sum_i p_i \, E_i[(y - \mu)^2]$$

In the backward pass, the client's own $\partial F_i / \partial \sigma^2$ and
$\partial F_i / \partial \mu$ replace the sums over the clients. They are not detached:

$$\frac{\partial F_i}{\partial y} = \frac{g}{s} + \frac{\partial F_i}{\partial \sigma^2} \frac{2 (y - \mu)}{n_i} +
\frac{1}{n_i} \frac{\partial F_i}{\partial \mu}$$

with $g = \partial F_i / \partial \hat{x}$, $s = \sqrt{\sigma^2 + \epsilon}$ and $n_i$
elements per channel, as in FedTAN. If examples have different numbers of elements,
FedTAN's $w_i$ and $n_i p_i / w_i$ replace $p_i$ and $n_i$.

## Differs from the paper

The differences of FedTAN apply.

## Law

None: its first step is not a centralized step.
"""

from __future__ import annotations

from fedbn_flwr.strategies.fedtan import FedTAN, FedTANMethod


class FedDNAMethod(FedTANMethod):
    """FedTAN without the exchange of gradients."""

    name = "feddna"
    summary_line = (
        "FedTAN's forward half only: global statistics, own gradients through them"
    )
    source = "Duan 2021; arXiv:2301.02982, 6.1.3"
    alone = "feddna is a baseline for comparison; use fedtan in a combination"
    backward = "own"


class FedDNA(FedTAN):
    """FedTAN without the exchange of gradients.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedDNA
        >>> strategy = FedDNA()
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> strategy.reports[1].train.exchanges  # 2L + 1, and L = 1 layer
        3
    """

    method = FedDNAMethod
