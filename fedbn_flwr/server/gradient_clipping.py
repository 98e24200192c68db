"""Adaptive gradient clipping as a client hook of every strategy; the formula is in ``training.gradient_clipping``."""

from __future__ import annotations

from torch import nn

from fedbn_flwr.messages.protocol import Key
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.training.gradient_clipping import clip_gradients, exclude_head

__all__ = ["AGC", "ClipGradients"]

AGC = Key("fedbn-flwr.agc", "float: lambda", "server", "client")


class ClipGradients(ClientHook):
    """Client half: adaptive gradient clipping in every step."""

    def __init__(self, clipping: float) -> None:
        self._clipping = clipping
        self._head: tuple[nn.Parameter, ...] | None = None

    def gradients(self, model: nn.Module) -> None:
        """Clip all gradients except those of the classifier's last layer."""
        if self._head is None:
            self._head = exclude_head(model)  # once a round: it takes as long as a step of a small model
        clip_gradients(model.parameters(), self._clipping, exclude=self._head)
