r"""FedRep: each client keeps a head and trains it before the shared body.

Collins et al. 2021, "Exploiting Shared Representations for Personalized Federated
Learning", arXiv:2102.07078, Algorithm 1.

## When

Use when: clients have different classes or labels, and each needs its own model.

Not when: one model must know all classes.

## Problem

Clients with different labels may share a body, but they cannot share a last layer.

## Algorithm

Client $i$ receives the body $\phi$. Its first `head_steps` $= \tau_h$ steps train only
its head $h_i$, and the other steps train only $\phi_i$. The server averages
$\phi = \sum_i p_i \phi_i$. `personal` names the head; if it is empty, the head is the
layer that makes the outputs. The body's statistics move in all steps. In a loop with
several optimizers, a step is a backward pass and the optimizer steps after it. With
`head_steps=0 fine_tune=STEPS`, the method is FedBABU (arXiv:2106.06042).

## Differs from the paper

Steps are counted instead of epochs. The weights are $p_i$, as in the authors' code
(lgcollins/FedRep); Algorithm 1 has equal weights. At the end of a run, that code trains
every client's head for ten more epochs before the test, and a client that has not
trained gets the average of the last heads. Here a test follows its round, and such a
client has the initial head.

## Law

With $\tau_h = 0$, only the body trains.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from pydantic import field_validator
from torch import nn

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.problems import Problem
from fedbn_flwr.server.methods.method import Ask, Facts, Method
from fedbn_flwr.server.methods.params import Params, setting
from fedbn_flwr.server.methods.phases import PERSONAL, Phase
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.training.model_state import without_wrappers
from fedbn_flwr.training.optimizer_hooks import parameters_of


class FedRepParams(Params):
    """Parameters of FedRep. Without ``personal`` the head is ``last-layer``."""

    head_steps: int = setting(
        1,
        "tau_h: local steps at the start of a round that train only the head",
        ge=0,
    )

    @field_validator("personal")
    @classmethod
    def _head(cls, personal: str) -> str:
        return personal or "last-layer"


HEAD_STEPS = "fedbn-flwr.head-steps"  # int: tau_h


class HeadThenBody(ClientHook):
    """Client code that trains only the head in the first steps, then only the body."""

    purpose = "choose"

    def __init__(self, head: Collection[str], head_steps: int) -> None:
        self._head, self._head_steps = head, head_steps
        self._optimizers: list[torch.optim.Optimizer] = []
        self._trained: set[str] = set()
        self._taken = False

    def begin(self, model: nn.Module) -> None:
        """Refuse a head without parameters."""
        if not self._of_head(model):
            named = ", ".join(sorted(self._head)[:3]) or "none"
            raise ConfigError(
                "fedrep trains a head for each client, but none of the personal"
                f" entries ({named}) is a parameter of the model. Set personal to the"
                " layer that makes the outputs."
            )

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Store the optimizer."""
        self._optimizers.append(optimizer)

    def gradients(self, model: nn.Module) -> None:
        """Drop the gradients of the part that does not train in this step."""
        part = "head" if self.step < self._head_steps else "body"
        self._taken = True
        head = self._of_head(model)
        for parameter in {*model.parameters()}.union(
            *map(parameters_of, self._optimizers)
        ):
            # Set the gradient to None and not to 0, so that the optimizer does not
            # change the parameter, not even by decay or momentum.
            if (parameter in head) != (part == "head"):
                parameter.grad = None
            elif parameter.grad is not None:
                self._trained.add(part)

    def end(self, model: nn.Module) -> dict[str, float]:
        """Refuse a round that has not trained the head."""
        if self._taken and self._head_steps and "head" not in self._trained:
            raise ConfigError(
                f"head-steps={self._head_steps}, but none of the first steps trained the"
                " head. With several optimizers, step the optimizer of the head first."
            )
        return {}

    def _of_head(self, model: nn.Module) -> set[nn.Parameter]:
        named = model.named_parameters()
        return {p for name, p in named if without_wrappers(name) in self._head}


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

    def phases(self) -> tuple[Phase, ...]:
        """Return a phase that keeps the head on the client."""
        return (Phase(local=PERSONAL),)

    def on_clients(self, state: None, facts: Facts) -> list[Ask]:
        """Send tau_h."""
        return [Ask("head-then-body", {HEAD_STEPS: self.params.head_steps})]


class FedRep(Strategy):
    """FedAvg of the body, after steps on each client's own head.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedRep
        >>> strategy = FedRep(head_steps=1, personal="2")  # the path of the head
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> result.arrays["2.weight"] == arrays["2.weight"]
        True
    """

    method = FedRepMethod


# --- what may be wrong ----------------------------------------------------------------
FedRepMethod.checks = (
    Problem(
        "no-body-step",
        "head-steps={params.head_steps} leaves none of the {known.local_steps} local"
        " steps for the body. Use fewer head-steps, or more local steps.",
        "head_steps local_steps",
        needs="local_steps",
        when=lambda method, known: method.params.head_steps >= known.local_steps,
    ),
)
