r"""Momentum across rounds: SGD's buffers persist between rounds.

Zhong et al. 2023, "Making Batch Normalization Great in Federated Deep Learning",
arXiv:2303.06530, section 7.

## Algorithm

With `momentum_scope="none"`, each round starts with a new optimizer. With "local", the
client keeps its buffers. With "global", the server averages the buffers $b_i$ and sends
the result to the clients for the next round:

$$b = \sum_i p_i b_i$$

Buffers of local parts stay with the client. With "global", a parameter that trains, but
is not in the loss of a step, has the gradient 0 in this step. Otherwise, as in torch, the
step leaves it out.

## What travels

- sent down: with "global" the averaged buffers, otherwise nothing more
- sent up: with "global" the buffers of shared entries
- kept: with "local" all buffers, with "global" the buffers of local parts
- cost: with "global" the trainable shared floats a second time, per client

## Law

Global momentum with one step, full participation and a norm without batch statistics
(or BN frozen) equals centralized SGD with momentum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedbn_flwr.training.client_hook import ClientHook, Entries, Extras
from fedbn_flwr.training.optimizer_hooks import parameters_of

MOMENTUM = "momentum"  # ArrayRecord: SGD's buffers
SCOPE = "fedbn-flwr.momentum-scope"  # str
Scope = Literal["none", "local", "global"]


@dataclass(frozen=True)
class Momentum:
    """The averaged momentum by entry, only used if the scope is "global"."""

    momentum: Mapping[str, Any] = field(default_factory=dict)


class MomentumBuffers(ClientHook):
    """Client code that loads SGD's buffers, and sends or keeps them after training."""

    def __init__(self, scope: Scope, local: frozenset[str]) -> None:
        self._scope = scope
        # All clients have one buffer of a parameter, so it decays at all of them.
        self.of_zero = scope == "global"
        self._local = local
        self._start: dict[str, Tensor] = {}
        self._kept: Entries = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._optimizers: list[torch.optim.Optimizer] = []

    def receive(self, sent: Extras, kept: Entries) -> None:
        """Store the kept buffers, and the server's buffers for all other entries."""
        self._start, self._kept = {**sent.get(MOMENTUM, {}), **kept}, kept

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load the buffers into the optimizer."""
        self._optimizers.append(optimizer)
        # Use remove_duplicate=False, because a tied weight has several names.
        parameters = model.named_parameters(remove_duplicate=False)
        # With several optimizers, a parameter may be frozen while another one trains.
        self._parameters |= {name: p for name, p in parameters if p.requires_grad}
        for name, parameter in self._parameters.items():
            if name in self._start:
                # Use the parameter's memory order, as torch does. Otherwise torch
                # cannot use its fast updates.
                buffer = torch.empty_like(parameter, requires_grad=False).copy_(
                    self._start[name]
                )
                optimizer.state[parameter]["momentum_buffer"] = buffer

    def reply(self) -> Extras:
        """Return the buffers of shared entries if the server averages them."""
        if self._scope != "global":
            return {}
        return {MOMENTUM: self._buffers(shared=True)}

    def keep(self) -> Entries:
        """Return the buffers that stay here, all or only the buffers of local parts."""
        # As in torch, a parameter that does not train keeps its buffer.
        kept = {**self._kept, **self._buffers(shared=False)}
        if self._scope == "local":
            kept |= self._buffers(shared=True)
        return kept

    def _buffers(self, shared: bool) -> dict[str, Tensor]:
        # Two optimizers may have a state of the same parameter. Use the state of the
        # optimizer that steps the parameter.
        states: dict[Tensor, dict[str, Tensor]] = {}
        for optimizer in self._optimizers:
            own = parameters_of(optimizer)
            for parameter, state in optimizer.state.items():
                if parameter in own or parameter not in states:
                    states[parameter] = state
        buffers = {}
        for name, parameter in self._parameters.items():
            if (name not in self._local) == shared and states.get(parameter):
                # Sparse gradients make a sparse buffer, and records are dense.
                buffers[name] = states[parameter]["momentum_buffer"].to_dense()
        return buffers
