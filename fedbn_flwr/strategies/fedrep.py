r"""FedRep: each client keeps a head, and trains it before the shared body.

Collins et al. 2021, "Exploiting Shared Representations for Personalized Federated
Learning", arXiv:2102.07078, Algorithm 1.

## When

Use when: clients have other classes or labels, and each is served its own model.

Not when: one model must know all classes.

## Problem

A body may serve clients whose labels differ; a last layer cannot.

## Algorithm

Client $i$ receives the body $\phi$. Its first `head_steps` $= \tau_h$ steps train its head
$h_i$ alone, the others $\phi_i$ alone. The server averages $\phi = \sum_i p_i \phi_i$.
`personal` names the head, empty = the last layer. The body's statistics move in all steps.
With `head_steps=0 fine_tune=STEPS` it is FedBABU (arXiv:2106.06042).

## Differs from the paper

Steps, not epochs. Weights $p_i$, as in the authors' code (lgcollins/FedRep); Algorithm 1
weighs all clients alike. That code tests, at its end, after ten further epochs of every
client's head, and gives a client that has not trained the average of the last heads;
here a test follows its round, with the first head.

## Law

With $\tau_h = 0$ the body alone trains.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.protocol import Key
from fedbn_flwr.server.methods.method import Ask, Facts, Method
from fedbn_flwr.server.methods.method_params import FedRepParams
from fedbn_flwr.server.methods.travels import PERSONAL, Travels
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.training.model_state import without_wrappers

__all__ = ["FedRep", "FedRepMethod", "HeadThenBody"]

HEAD_STEPS = Key("fedbn-flwr.head-steps", "int: tau_h", "server", "client")


class HeadThenBody(ClientHook):
    """Client half: the first steps train the head alone, the others the body."""

    def __init__(self, head: Collection[str], head_steps: int) -> None:
        self._head, self._head_steps = head, head_steps
        self._left = self._taken = 0

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Count the steps of the head for this optimizer: each takes its own."""
        self._left += self._head_steps

    def gradients(self, model: nn.Module) -> None:
        """Drop the gradients of the part that does not train in this step."""
        trains_head = self._left > 0
        self._left -= 1
        self._taken += 1
        for name, parameter in model.named_parameters():
            # None, not 0: an optimizer leaves it as it is, without decay and momentum.
            if (without_wrappers(name) in self._head) != trains_head:
                parameter.grad = None

    def end(self, model: nn.Module) -> dict[str, float]:
        """Refuse a round that has not trained the body."""
        if self._taken and self._left >= 0:
            raise ConfigError(
                f"head-steps={self._head_steps} leaves none of the local steps for the"
                " body: use fewer, or more local steps"
            )
        return {}


class FedRepMethod(Method[FedRepParams]):
    """FedAvg of the body, after steps on each client's own head."""

    name = "fedrep"
    summary_line = "each client keeps a head, and trains it before the shared body"
    source = "Collins 2021, arXiv:2102.07078"
    role = "client-hooks"
    Params = FedRepParams
    client_hooks = {
        "head-then-body": lambda context: HeadThenBody(
            context.personal, int(context.config[HEAD_STEPS])
        )
    }

    def travels(self, num_rounds: int | None = None) -> tuple[Travels, ...]:
        """Return that the head stays."""
        return (Travels(local=PERSONAL),)

    def on_clients(self, state: None, facts: Facts) -> list[Ask]:
        """Send tau_h."""
        return [Ask("head-then-body", {HEAD_STEPS: self.params.head_steps})]


class FedRep(Strategy):
    """FedAvg of the body, after steps on each client's own head."""

    method = FedRepMethod
