"""How many examples a pass holds, and the examples of several clients without a copy of all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedbn_flwr.doctor.clients import ClientData

__all__ = ["VALUES", "VALUES_B", "examples_a_pass", "examples_of_b", "inputs_at", "parts"]

VALUES = 2**22
"""Values of the inputs of a pass without gradient: 16 MiB, and a few times as much in a layer of a network."""

VALUES_B = 2**24
"""Values of the inputs of all clients in B_i, whose passes keep every layer for the gradient at the same time."""

_FEWEST = 32  # for statistics of a batch; of B_i 2


def examples_a_pass(clients: Sequence[ClientData], most: int) -> int:
    """Return the number of examples of a pass: ``most``, fewer of large examples, but 32."""
    return min(most, max(_FEWEST, VALUES // _size(clients)))


def examples_of_b(clients: Sequence[ClientData], most: int) -> int:
    """Return the number of examples of a client in B_i: ``most``, fewer of large examples or many clients, but 2."""
    return min(most, max(2, VALUES_B // (_size(clients) * len(clients))))


def parts(order: Tensor, size: int) -> list[Tensor]:
    """Return parts of nearly equal size of the positions: a last one of one example fails in BatchNorm."""
    return list(order.tensor_split(-(-len(order) // size)))


def inputs_at(clients: Sequence[ClientData], positions: Tensor) -> Tensor:
    """Return the inputs at positions of all clients' examples, counted through in order."""
    ends = torch.tensor([len(client) for client in clients]).cumsum(0)
    owners = torch.searchsorted(ends, positions, right=True)
    inputs = torch.empty((len(positions), *clients[0].inputs.shape[1:]), dtype=clients[0].inputs.dtype)
    for k in torch.unique(owners).tolist():
        of_client = owners == k
        inputs[of_client] = clients[k].inputs[positions[of_client] - (int(ends[k]) - len(clients[k]))]
    return inputs


def _size(clients: Sequence[ClientData]) -> int:
    return max(1, clients[0].inputs[:1].numel())
