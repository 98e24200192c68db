"""The input of a client for making the hooks of a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fedbn_flwr.messages.protocol import MessageConfig
from fedbn_flwr.problems import Known
from fedbn_flwr.training.borrowed import Lend
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.training.model_state import without_wrappers
from fedbn_flwr.transport import Reducer

__all__ = ["HookContext", "HookFactory"]


@dataclass(frozen=True)
class HookContext:
    """The input of a ``HookFactory``.

    Attributes:
        config: the config of the training message; each method declares its keys in its
            own file.
        local_entries: names of the entries that stay with this client.
        reducer: the client's reducer in a synchronised step; None otherwise.
        validation_loss: returns the loss of a model on the client's validation data,
            and raises DataError if the client has none. None if the training loop
            belongs to another project.
        train: trains a model as the client does, with ``hooks`` and ``task``; None in a
            loop of another project.
        second_model: lends a second model with the state of the client's model and its
            task, while
            the block does not use the latter; None in a loop of another project.
        known: the facts of the client's training that the checks read; empty in a loop of
            another project.
    """

    config: Mapping[str, Any]
    local_entries: frozenset[str] = frozenset()
    reducer: Reducer | None = None
    validation_loss: Callable[[nn.Module], float] | None = None
    train: Callable[..., object] | None = None
    second_model: Lend | None = None
    known: Known = field(default_factory=Known)

    @property
    def layers(self) -> tuple[str, ...]:
        """The paths of the method's BatchNorm layers, or nothing for all layers."""
        return MessageConfig.read(self.config).layers

    @property
    def personal(self) -> frozenset[str]:
        """The names of ``MessageConfig.personal``, without a wrapper's prefix."""
        names = MessageConfig.read(self.config).personal
        return frozenset(map(without_wrappers, names))


HookFactory = Callable[[HookContext], ClientHook]
