r"""FedNova: each client's change divided by its steps, aware of BatchNorm.

Wang, Liu, Liang, Joshi, Poor 2020, "Tackling the Objective Inconsistency Problem in
Heterogeneous Federated Optimization", arXiv:2007.07481, section 4.

## When

Use when: the clients take different numbers of local steps, because they train by
epochs and have different amounts of data.

Not when: all clients take the same number of steps. Then the method equals FedAvg.

## Problem

A client with more steps moves further. The average then has more of this client than
its share $p_i$, and the model converges to the optimum of another objective.

## Algorithm

Client $i$ moves from $x$ to $y_i$. Its change is a sum of gradients with the weights
$a_i$, and $\tau_i$ is the sum of these weights times the learning rate:

$$\tau_i = \eta \, \lVert a_i \rVert_1, \qquad d_i = \frac{x - y_i}{\tau_i}$$

$\lVert a_i \rVert_1$ is the number of steps for SGD without momentum. With momentum
$\rho$, each step counts $v \leftarrow \rho v + 1$, from $v = 0$. The server takes

$$x \leftarrow x - \Bigl( \sum_i p_i \tau_i \Bigr) \sum_i p_i d_i, \qquad p_i = \frac{|D_i|}{\sum_j |D_j|}$$

for all parameters, including gamma and beta. Running statistics and buffers are averaged
with $p_i$, as in FedAvg. BN's integer counters take the maximum.

## Differs from the paper

The paper has no BatchNorm. The paper includes $\eta$ in $x - y_i$ and not in $\tau_i$;
the result is equal, and here a schedule within a round also counts. A proximal term
does not change $a_i$ here. Server momentum and variance
reduction of the paper's experiments are left out.

## Law

With equal $\tau_i$, FedNova equals FedAvg, bit for bit. If every gradient is 1, a
client moves by $\tau_i$, for any momentum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fedbn_flwr.batchnorm.averaging import to_shares, weighted_sum, wide_type
from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.problems import Problem
from fedbn_flwr.server.methods.method import (
    Ask,
    Facts,
    Method,
    Node,
    Replies,
    Reply,
    far_from_others,
)
from fedbn_flwr.server.methods.phases import Extra, Phase
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.strategies.fedopt import STEPPED_BUFFERS
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.training.optimizer_hooks import parameters_of

TAU = "fednova-tau"  # float: tau_i
# Times the median: no client takes so many more steps than others, or so few.
_FAR = 1e6


class MeasureTau(ClientHook):
    """Client code that measures tau_i, the way of gradients of 1."""

    purpose = "count"
    of_all_steps = "tau depends on all steps: return the weights of the last step"

    def __init__(self, local: frozenset[str] = frozenset()) -> None:
        self._local = local
        self._optimizers: list[torch.optim.Optimizer] = []
        self._counted = -1
        self._velocity = self._tau = 0.0

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Store the optimizer, because a schedule may change its rate and momentum."""
        self._optimizers.append(optimizer)

    def gradients(self, model: nn.Module) -> None:
        """Count a step that trains a shared parameter."""
        # Several optimizers may step after the same backward pass.
        if self.step == self._counted:
            return
        group = self._group(model)
        if group is None:
            return
        self._counted = self.step
        momentum = group.get("momentum", 0.0)
        # As in torch, dampening applies only to momentum, and not to its first gradient.
        dampened = bool(momentum and self._velocity)
        new = 1 - group.get("dampening", 0.0) if dampened else 1.0
        self._velocity = way = momentum * self._velocity + new
        if group.get("nesterov"):
            way = 1 + momentum * self._velocity
        self._tau += float(group["lr"]) * way

    def _group(self, model: nn.Module) -> dict[str, Any] | None:
        """Return the group of the first shared parameter of the optimizer that steps."""
        named = model.named_parameters()
        shared = [p for n, p in named if p.requires_grad and n not in self._local]
        for optimizer in self._optimizers:
            own = [p for p in shared if p in parameters_of(optimizer)]
            # The first may be idle in this step, such as an expert.
            if any(p.grad is not None for p in own):
                for group in optimizer.param_groups:
                    if any(own[0] is p for p in group["params"]):
                        return group
        return None

    def end(self, model: nn.Module) -> dict[str, float]:
        """Return tau_i."""
        return {TAU: self._tau}


class FedNovaMethod(Method):
    """FedAvg of the clients' changes, each divided by its tau_i."""

    name = "fednova"
    summary_line = "each client's change divided by its steps; BN statistics averaged"
    source = "Wang 2020, arXiv:2007.07481"
    role = "server-step"
    client_hooks = {"measure-tau": lambda context: MeasureTau(context.local_entries)}

    def phases(self) -> tuple[Phase, ...]:
        """Return a phase with single replies and the tau of each."""
        why = "the server divides the change of each client by its tau"
        instead = "FedAvg with the same local-steps for all clients"
        tau = Extra(TAU, "scalar", why, required=True, instead=instead)
        return (
            Phase(
                each=frozenset({Part.AFFINE, Part.REST}),
                extras=(tau,),
                decides=frozenset({"server step"}),
            ),
        )

    def on_clients(self, state: None, facts: Facts) -> list[Ask]:
        """Ask for tau."""
        return [Ask("measure-tau")]

    def far(
        self, state: None, facts: Facts, replies: Sequence[Reply]
    ) -> dict[Node, str]:
        """Refuse a tau that no client can have: it scales the steps of the others."""
        taus = {reply.node: reply.metrics[TAU] for reply in replies}
        return far_from_others(f"metric '{TAU}'", taus, _FAR, 1 / _FAR)

    def aggregate(
        self, state: None, facts: Facts, replies: Replies, model: dict[str, Any]
    ) -> tuple[dict[str, Any], None]:
        """Step the parameters by (sum p_i tau_i) sum p_i d_i."""
        taus = [reply.metrics[TAU] for reply in replies]
        # With equal tau, the factors below are 1 only up to rounding.
        if len(set(taus)) == 1:
            return model, state
        shares = to_shares(replies.weights)
        common = sum(p * tau for p, tau in zip(shares, taus, strict=True))
        factors = [p * common / tau for p, tau in zip(shares, taus, strict=True)]
        for name in facts.stepped:
            before = facts.before[name]
            x = before.astype(wide_type(before))
            ways = [reply.state[name].astype(x.dtype) - x for reply in replies]
            model[name] = (x + weighted_sum(ways, factors)).astype(before.dtype)
        return model, state


class FedNova(Strategy):
    """FedAvg of the clients' changes, each divided by its tau_i.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedNova
        >>> strategy = FedNova()
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> result.train_metrics_clientapp[2]["fednova-tau"]  # 2 steps of 0.1
        0.2
    """

    method = FedNovaMethod


# --- what may be wrong ----------------------------------------------------------------
FedNovaMethod.checks = (
    STEPPED_BUFFERS,
    Problem(
        "tau-needs-sgd",
        "{method.title} has tau only for SGD: optimizer={known.optimizer} must be sgd",
        "optimizer",
        needs="optimizer",
        when=lambda method, known: known.optimizer != "sgd",
    ),
    Problem(
        "tau-of-one-round",
        "{method.title} counts the momentum of one round:"
        " momentum-scope={params.momentum_scope} must be none",
        "momentum_scope",
        stage="settings",
        when=lambda method, known: method.params.momentum_scope != "none",
    ),
)
