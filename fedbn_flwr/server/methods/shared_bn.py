"""Averaged BN parts: tests of a global model whose clients keep their own BN.

In a test, a client that has no BN of its own yet uses the average as well. The idea is
from Idrissi, Berrada, Noubir 2021, "FEDBS: Learning on Non-IID Data in Federated
Learning using Batch Normalization", section V. It is opt-in and only for tests
(`eval-on` contains `averaged-bn`): training does not use the average. The saved model
and the arrays of an `evaluate_fn` contain the average as well.

## Algorithm

Each client shares a copy of its BN parts after training. The server keeps the latest
copy of each client and averages the copies with the weights $p_i$. A client whose
training does not apply the client hook shares nothing and is left out.

## What travels

- sent down: nothing; in a test, the average to clients without own parts
- sent up: the client's BN parts, in addition to the model
- cost: the floats of the local BN parts up per client
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedbn_flwr.batchnorm.array_types import State
from fedbn_flwr.batchnorm.averaging import Variance, average
from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.training.client_hook import ClientHook, Extras

# The name of this record is also the name of the test in eval-on.
SHARED_BN = "averaged-bn"  # ArrayRecord: a client's BN parts


class ShareBN(ClientHook):
    """Client code that sends a copy of the local parts to the server after training."""

    def __init__(self, local: frozenset[str]) -> None:
        self._local = local
        self._own: dict[str, torch.Tensor] = {}

    def end(self, model: nn.Module) -> dict[str, float]:
        """Copy the local parts."""
        self._own = {}
        for name, value in model.state_dict().items():
            if name in self._local:
                self._own[name] = value.clone()
        return {}

    def reply(self) -> Extras:
        """Return the copy."""
        return {SHARED_BN: self._own}


@dataclass(frozen=True)
class LatestBN:
    """The latest BN entries of each client, with its number of examples, as a value.

    Attributes:
        tree: a sorted list with an item for each client: whether its partition is
            unknown, its partition id (or node id), its entries, and its number of
            examples. Node ids change when a node or a run restarts.
    """

    tree: Sequence[Sequence[Any]] = ()

    def with_latest(
        self, sent: Iterable[tuple[tuple[bool, int, int], State, float]]
    ) -> LatestBN:
        """Return a copy with the entries that these clients sent.

        ``sent`` has the sorting key (``Node.order``), the entries and the number of
        examples of each client. A client without entries keeps its earlier entries.
        """
        latest: dict[tuple[bool, int], tuple[State, float]] = {}
        for silent, number, entries, num_examples in self.tree:
            latest[silent, number] = entries, num_examples
        for (silent, partition_id, node_id), entries, num_examples in sent:
            if not entries:
                continue
            # Copy, because a view would keep the whole message in memory.
            copies = {name: array.copy() for name, array in entries.items()}
            number = node_id if silent else partition_id
            latest[silent, number] = copies, num_examples
        return LatestBN([[*order, *latest[order]] for order in sorted(latest)])

    @property
    def latest(self) -> list[tuple[State, float]]:
        """The latest entries of each client and its examples, by partition id."""
        return [(entries, num_examples) for _, _, entries, num_examples in self.tree]

    def average(self, parts: Parts, variance: Variance) -> dict[str, Any]:
        """Return the p-weighted average over all clients that have sent a copy."""
        if not self.tree:
            return {}
        states = [entries for entries, _ in self.latest]
        counts = [count for _, count in self.latest]
        return average(states, counts, parts, variance)
