r"""FedProx: FedAvg with a proximal term in the local loss.

Li et al. 2020, "Federated Optimization in Heterogeneous Networks", arXiv:1812.06127,
Algorithm 2.

## When

Use when: clients do many local steps and drift apart.

Not when: BatchNorm causes the problem. The penalty does not change its statistics.

## Problem

With different data and many local steps, the clients drift away from the global model,
each in its own direction. A penalty on the distance keeps them together.

## Algorithm

In round $t$ client $k$ minimises

$$F_k(w) + \frac{\mu}{2} \lVert w - w^t \rVert^2$$

$\mu$ is `proximal_mu`. $w^t$ are the trainable parameters as received; running
statistics have no gradient and no penalty. The server averages as FedAvg.

## Differs from the paper

None known. A client makes a fixed number of steps, so these steps determine the
gamma-inexactness.

## Law

$\mu = 0$ is FedAvg, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from fedbn_flwr.problems import Problem
from fedbn_flwr.server.methods.method import Ask, Facts, Method
from fedbn_flwr.server.methods.params import Params, setting
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.training.client_hook import ClientHook


class FedProxParams(Params):
    """Parameters of FedProx."""

    proximal_mu: float = setting(
        0.0, "mu >= 0 of the proximal term", in_config=0.01, ge=0
    )


PROXIMAL_MU = "fedbn-flwr.proximal-mu"  # float: mu


class ProximalTerm(ClientHook):
    """Client code that adds a proximal term to the loss.

    The term is mu/2 times the sum of (w - w_received)^2 over the trainable parameters
    w. ``received`` has the values of the received model if another model trains.
    """

    def __init__(self, mu: float, received: Sequence[Tensor] = ()) -> None:
        self.mu, self._given = mu, received
        self._received: dict[nn.Parameter, Tensor] = {}

    def begin(self, model: nn.Module) -> None:
        """Store the trainable parameters as received."""
        if self._given:
            self._received = dict(zip(model.parameters(), self._given, strict=True))
        self._note_trained(model)

    def penalty(self, model: nn.Module) -> Tensor | None:
        """Return mu/2 ||w - w_received||^2, or None for mu = 0."""
        # Return None, because a loss + 0 has FedAvg's value, but not always FedAvg's
        # bits.
        if self.mu == 0:
            return None
        # A parameter that was frozen until now still has its received value.
        self._note_trained(model)
        squares = []
        for parameter, received in self._received.items():
            squares.append(_real(parameter - received).square().sum())
        return self.mu / 2 * torch.stack(squares).sum()

    def _note_trained(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter not in self._received:
                self._received[parameter] = parameter.detach().clone()


def _real(change: Tensor) -> Tensor:
    """Return the values, or the real and imaginary parts of a complex tensor."""
    return torch.view_as_real(change) if change.is_complex() else change


P = TypeVar("P", bound=FedProxParams, default=FedProxParams)
S = TypeVar("S", default=None)


class FedProxMethod(Method[P, S]):
    """FedAvg whose clients add a proximal term to their loss."""

    name = "fedprox"
    summary_line = "FedAvg with mu/2 ||w - w_global||^2 in the local loss"
    source = "Li 2020, arXiv:1812.06127"
    role = "client-hooks"
    Params = FedProxParams
    client_hooks = {
        "proximal": lambda context: ProximalTerm(float(context.config[PROXIMAL_MU]))
    }

    def on_clients(self, state: S, facts: Facts) -> list[Ask]:
        """Send mu, or ask for nothing if mu is 0.

        With mu = 0, the default in Flower, a client need not support the hook.
        """
        if self.params.proximal_mu == 0:
            return []
        return [Ask("proximal", {PROXIMAL_MU: self.params.proximal_mu})]


class FedProx(Strategy):
    """FedAvg whose clients add a proximal term to their loss.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedProx
        >>> strategy = FedProx(proximal_mu=0.01)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> result.train_metrics_clientapp[2]["steps"]  # 3 clients, 2 steps each
        6
    """

    method = FedProxMethod


# --- what may be wrong ----------------------------------------------------------------
# A step on only the proximal term overshoots if the learning rate times mu is above 2.
LARGE_MU = Problem(
    "large-mu",
    "With proximal-mu={params.proximal_mu:g}, a learning-rate above 2 / proximal-mu"
    " diverges, because the proximal term overshoots: lower one of them.",
    "proximal_mu learning_rate",
    effect="remedy",
    stage="diverged",
    when=lambda method, known: method.params.proximal_mu > 0,
)
NO_TERM = Problem(
    "no-proximal-term",
    "{method.title}: with proximal-mu=0, the default in Flower, the clients train as"
    " in fedavg. Use a proximal-mu above 0, such as 0.01.",
    "proximal_mu",
    effect="warn",
    when=lambda method, known: method.params.proximal_mu == 0,
)
FedProxMethod.checks = (LARGE_MU, NO_TERM)
