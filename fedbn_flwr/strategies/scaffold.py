r"""SCAFFOLD: local steps corrected by control variates, aware of BatchNorm.

Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning", arXiv:1910.06378, Algorithm 1, option II.

## When

Use when: gradients differ between clients, most clients take part in each round, and
you can send twice as many floats.

Not when: clients take part once or twice, or BatchNorm's statistics cause the problem.

## Problem

With different data, each client's gradient points away from the common gradient, and
local steps drift. Each client has its own direction $c_i$ and the common direction $c$,
and corrects every step by the difference.

## Algorithm

Local step, with the gradient $g$ of the client's loss:

$$y \leftarrow y - \eta_l (g - c_i + c)$$

After $K_i$ steps from $x$ to $y_i$:

$$c_i^+ = c_i - c + \frac{x - y_i}{K_i \eta_l}$$

A parameter that trains, but is not in the loss of a step, such as an idle expert, has
the gradient $g = 0$ in this step. In a training loop with a schedule or with groups of
parameters, $K_i \eta_l$ is the sum of the rates of the parameter over its steps.

The server takes unweighted means over the $S$ of $N$ clients that took part:

$$x \leftarrow x + \eta_g \, \mathrm{mean}(y_i - x), \qquad c \leftarrow c + \frac{S}{N} \, \mathrm{mean}(c_i^+ - c_i)$$

$\eta_l$ is the round's learning rate, $\eta_g$ is `server_learning_rate`, $K_i$ the
number of the client's steps. The variates $c$ and $c_i$ cover only trainable parameters
and start at zero. Momentum and other optimizers are refused, because
$(x - y_i) / (K_i \eta_l)$ is a mean gradient only under plain SGD.

## Differs from the paper

The paper has no BatchNorm. Running statistics and buffers are averaged with $p_i$ and
not corrected.

In the paper, no reply is lost and $N$ is known. Here, if a reply is refused or comes too
late, the client restores its previous $c_i$ when the server next calls it, so that $c$
remains the mean of the $c_i$. $N$ is the number of clients with data so far, including
rounds that were not used, and $c$ is scaled when $N$ grows. A parameter that your loop
freezes for a round keeps its $c_i$ and $c$. In two cases $c$ is not the
mean. A client that has lost $c_i$ starts with zero, and the log names it. A node without
a partition id does not restore $c_i$. Each run starts with all variates at
zero.

## Law

With variates at zero, equal clients and $\eta_g = 1$, SCAFFOLD equals FedAvg.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from fedbn_flwr.batchnorm.averaging import sum_of_squares, weighted_sum, wide_type
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
from fedbn_flwr.server.methods.params import Params, setting
from fedbn_flwr.server.methods.phases import Extra, Phase
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.training.client_hook import ClientHook, Entries, Extras
from fedbn_flwr.training.optimizer_hooks import dense_gradient


class ScaffoldParams(Params):
    """Parameters of SCAFFOLD."""

    server_learning_rate: float = setting(
        1.0, "the server's learning rate (eta_g)", gt=0
    )


_NEEDS_SGD = (
    "scaffold corrects plain SGD: its variates are changes of the weights divided by K"
    " * eta, and these are mean gradients only under SGD"
)

VARIATES = "variates"  # ArrayRecord: c down, dc_i up
# Times the median: no client takes so many fewer steps than others.
_FAR = 1e4


P = TypeVar("P", bound=ScaffoldParams, default=ScaffoldParams)


class ControlVariates(ClientHook):
    """Client code that adds c - c_i to every gradient.

    The change of the weights from x gives the new c_i. Entries that stay with the
    client have no common direction, and no variates. Tied weights have one variate,
    under the first of their names; the reply has all names.
    """

    of_all_steps = (
        "the variates depend on all steps: load other weights after the block"
    )
    # Act after hooks that drop gradients, because this hook counts the steps of each
    # parameter.
    purpose = "correct"
    of_zero = True  # a step corrects every parameter, even if the loss does not have it

    def __init__(self, local: frozenset[str] = frozenset()) -> None:
        self._local = local
        self._server: Entries = {}
        self._own: Entries = {}
        self._optimizers: list[torch.optim.Optimizer] = []
        self._start: dict[str, Tensor] = {}
        self._correction: dict[str, Tensor] = {}
        self._change: dict[str, Tensor] = {}
        self._first_names: dict[str, str] = {}
        # for each parameter, the number of its steps with each rate
        self._rates: dict[str, Counter[float]] = {}

    def receive(self, sent: Extras, kept: Entries) -> None:
        """Take c and c_i, with zero for missing entries."""
        # c is empty in the first round of the run, and c_i in the client's first round.
        self._server, self._own = sent.get(VARIATES, {}), kept

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Store x, and the names of the parameters."""
        self._optimizers.append(optimizer)
        first_names = {}
        for name, parameter in model.named_parameters():
            if name in self._local:
                continue
            first_names[parameter] = name
            if parameter.requires_grad and name not in self._start:
                self._begin_with(name, parameter)
        # The reply has each name of a tied weight, because the server steps entries.
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter in first_names:
                self._first_names[name] = first_names[parameter]

    def _begin_with(self, name: str, parameter: Tensor) -> None:
        """Store x and c - c_i of a parameter that trains."""
        self._start[name] = x = parameter.detach().clone()
        self._rates[name] = Counter()
        c, c_i = self._of(self._server, name, x), self._of(self._own, name, x)
        self._correction[name] = c - c_i

    def gradients(self, model: nn.Module) -> None:
        """Add c - c_i, and count this step under its rate."""
        # Read the rates in each step, because a schedule changes them between steps.
        rates: dict[Tensor, float] = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                rates |= dict.fromkeys(group["params"], float(group["lr"]))
        for name, parameter in model.named_parameters():
            gradient = None if name in self._local else dense_gradient(parameter)
            if gradient is None:
                continue
            # If ``parameter`` was frozen until now, it still has the value x.
            if name not in self._start and parameter.requires_grad:
                self._begin_with(name, parameter)
            if name in self._start:
                gradient += self._correction[name]
                if parameter in rates:
                    self._rates[name][rates[parameter]] += 1

    def end(self, model: nn.Module) -> dict[str, float]:
        """Compute dc_i = -c + (x - y_i) / sum_k eta_k, or 0 without a step."""
        self._change = {}
        for name, parameter in model.named_parameters():
            if name not in self._start:
                continue
            went = self._start[name] - parameter.detach()
            # With a single rate, compute K * eta, because a sum of K terms would round
            # differently.
            total = sum(count * rate for rate, count in self._rates[name].items())
            change = torch.zeros_like(went)
            if total:
                change = (1 / total) * went - self._of(self._server, name, went)
            self._change[name] = change
        return {}

    def reply(self) -> Extras:
        """Return dc_i under every name of a parameter."""
        changes = {}
        for name, first in self._first_names.items():
            if first in self._change:
                changes[name] = self._change[first]
        return {VARIATES: changes}

    def keep(self) -> Entries:
        """Return c_i+ = c_i + dc_i."""
        # c still has the share of a parameter that does not train in this round.
        kept = dict(self._own)
        for name, change in self._change.items():
            kept[name] = self._of(self._own, name, change) + change
        return kept

    @staticmethod
    def _of(variates: Entries, name: str, like: Tensor) -> Tensor:
        return variates[name].to(like) if name in variates else torch.zeros_like(like)


@dataclass(frozen=True)
class Variates:
    """The state of SCAFFOLD.

    Attributes:
        variates: c by entry. A missing entry is zero.
        num_clients: N, the number of clients with data so far.
    """

    variates: Mapping[str, Any] = field(default_factory=dict)
    num_clients: int = 0


S = TypeVar("S", bound=Variates, default=Variates)


class ScaffoldMethod(Method[P, S]):
    """Stochastic controlled averaging, with BN statistics averaged as in FedAvg."""

    name = "scaffold"
    summary_line = "control variates over trainable parameters; BN statistics averaged"
    source = "Karimireddy 2020, arXiv:1910.06378"
    role = "client-hooks"
    Params = ScaffoldParams
    State = Variates
    client_hooks = {"variates": lambda context: ControlVariates(context.local_entries)}

    def phases(self) -> tuple[Phase, ...]:
        """Return a phase that also sends the changes of the variates.

        If a reply is lost, the client undoes the round.
        """
        why = "the changes of the control variates come with the model"
        return (
            Phase(
                each=frozenset({Part.AFFINE, Part.REST}),
                extras=(Extra(VARIATES, "trainable", why, required=True),),
                undo=True,
                decides=frozenset({"server step", "gradients"}),
                keeps="c_i, and its value before the round",
            ),
        )

    def on_clients(self, state: S, facts: Facts) -> list[Ask]:
        """Send c, and ask the clients to apply the control variates."""
        return [Ask("variates", {}, {VARIATES: state.variates})]

    def far(self, state: S, facts: Facts, replies: Sequence[Reply]) -> dict[Node, str]:
        """Refuse variates that are no mean gradients.

        dc_i + c is the change of the weights, divided by K_i eta_l. So its norm over
        the norm of the change may only differ between clients as K_i does.
        """
        ratios = {}
        for reply in replies:
            norm = moved = 0.0
            for name, change in reply.extras[VARIATES].items():
                # An entry without a step has no gradient, whatever c is.
                if change.any():
                    norm += sum_of_squares(change + state.variates.get(name, 0))
                    moved += sum_of_squares(reply.state[name] - facts.before[name])
            ratios[reply.node] = math.sqrt(norm / (moved or sys.float_info.min))
        what = f"the norm of record '{VARIATES}', over the norm of the change,"
        return far_from_others(what, ratios, _FAR)

    def aggregate(
        self, state: S, facts: Facts, replies: Replies, model: dict[str, Any]
    ) -> tuple[dict[str, Any], S]:
        """Step x and c with the unweighted means of the clients' changes."""
        variates, num_clients = _scaled(state, facts, replies)
        # S of N clients took part: S is the number of replies.
        shares = [1 / len(replies)] * len(replies)
        part = len(replies) / num_clients
        changes = [reply.extras[VARIATES] for reply in replies]
        for name in dict.fromkeys(name for change in changes for name in change):
            before = facts.before[name]
            x = before.astype(wide_type(before))
            # x <- x + eta_g mean(y_i - x); the average in ``model`` has other weights.
            ways = [reply.state[name].astype(x.dtype) - x for reply in replies]
            moved = weighted_sum(ways, shares)
            stepped = x + self.params.server_learning_rate * moved
            model[name] = stepped.astype(before.dtype)
            # c <- c + S/N mean(dc_i); dc_i is 0 for an entry that does not train.
            zero = np.zeros_like(before)
            change = weighted_sum([dc.get(name, zero) for dc in changes], shares)
            c = variates.get(name, 0.0) + part * change
            variates[name] = c.astype(before.dtype)
        return model, replace(state, variates=variates, num_clients=num_clients)


def _scaled(
    state: Variates, facts: Facts, replies: Replies
) -> tuple[dict[str, Any], int]:
    """Return c and N, with c scaled if N grew, because c is a mean over N clients."""
    known = {*facts.known, *(reply.node.label for reply in replies)}
    # N is unknown beforehand, so it counts all clients that were seen, including
    # clients of unused rounds. Nodes that have not reported their partition count
    # only in the round of their reply.
    count = max(facts.most_able, len(known))
    variates = dict(state.variates)
    if count > state.num_clients > 0:
        share = state.num_clients / count
        for name, c in variates.items():
            variates[name] = (c * share).astype(c.dtype)
    return variates, count


class Scaffold(Strategy):
    """Stochastic controlled averaging, with BN statistics averaged as in FedAvg.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import Scaffold
        >>> strategy = Scaffold()
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> strategy.reports[1].train.down  # bytes: model 360, variate 296
        656
    """

    method = ScaffoldMethod


# --- what may be wrong ----------------------------------------------------------------
ScaffoldMethod.checks = (
    Problem(
        "needs-sgd",
        f"{_NEEDS_SGD}: optimizer={{known.optimizer}} must be sgd",
        "optimizer",
        needs="optimizer",
        when=lambda method, known: known.optimizer != "sgd",
    ),
    Problem(
        "needs-plain-sgd",
        "scaffold corrects plain SGD: {known.its_momentum}={known.sgd_momentum} must"
        " be 0",
        "sgd_momentum",
        needs="sgd_momentum",
        when=lambda method, known: known.sgd_momentum,
    ),
    Problem(
        "needs-minimization",
        "scaffold corrects plain SGD: the optimizer's maximize=True must be False",
        "optimizer",
        needs="maximizes",
        when=lambda method, known: known.maximizes,
    ),
    Problem(
        "needs-no-momentum",
        "scaffold corrects plain SGD: momentum-scope={params.momentum_scope} must be"
        " none",
        "momentum_scope",
        stage="settings",
        when=lambda method, known: method.params.momentum_scope != "none",
    ),
)
