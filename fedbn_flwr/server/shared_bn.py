"""Averaged BN parts: the BN of a global model where clients keep their own, and of a client that has none yet.

Idrissi, Berrada, Noubir 2021, "FEDBS: Learning on Non-IID Data in Federated Learning using Batch Normalization",
section V. Opt-in, for tests only (`eval-on` holds `averaged-bn`): training does not see the average. The saved model
and the arrays of an `evaluate_fn` hold it, too.

## Algorithm

Each client shares a copy of its BN parts after training. The server keeps the latest ones of each client and takes
their average with the weights $p_i$. A client whose training does not apply the client hook shares nothing and is left
out.

## What travels

| | per round |
|---|---|
| sent down | nothing; in a test, the average to clients without own parts |
| sent up | the client's BN parts, beside the model |
| cost | the floats of the local BN parts up per client |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fedbn_flwr.batchnorm.averaging import State, Variance, average
from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.messages.protocol import Key
from fedbn_flwr.training.client_hook import ClientHook, Extras

__all__ = ["SHARED_BN", "LatestBN", "ShareBN"]

SHARED_BN = Key("averaged-bn", "ArrayRecord: a client's BN parts", "client", "server")  # also the name in eval-on


class ShareBN(ClientHook):
    """Client half: send a copy of the local parts to the server after training."""

    def __init__(self, local: frozenset[str]) -> None:
        self._local = local
        self._own: dict[str, torch.Tensor] = {}

    def end(self, model: nn.Module) -> dict[str, float]:
        """Copy the local parts."""
        self._own = {name: value.clone() for name, value in model.state_dict().items() if name in self._local}
        return {}

    def reply(self) -> Extras:
        """Return the copy."""
        return {SHARED_BN: self._own}


class LatestBN:
    """Server half: the parts that each client shared last, and its number of examples.

    Args:
        tree: the property ``tree`` of an earlier object.
    """

    def __init__(self, tree: Sequence[Any] = ()) -> None:
        # By partition id, or by node id if unknown: node ids change when a node or a run restarts.
        self._latest: dict[tuple[bool, int], tuple[State, float]] = {(a, b): (state, n) for a, b, state, n in tree}

    @property
    def tree(self) -> list[list[Any]]:
        """The content as lists, mappings and arrays."""
        return [[*key, *self._latest[key]] for key in sorted(self._latest)]

    def take(self, order: tuple[bool, int, int], shared: State, num_examples: float) -> None:
        """Keep the parts of the client with this sorting key (``Node.order``), if it shared any."""
        if shared:
            silent, partition_id, node_id = order
            kept = {name: array.copy() for name, array in shared.items()}  # else the whole message stays in memory
            self._latest[silent, node_id if silent else partition_id] = kept, num_examples

    @property
    def latest(self) -> list[tuple[State, float]]:
        """What each client shared last, and its number of examples, in the order of partition ids."""
        return [self._latest[order] for order in sorted(self._latest)]

    def average(self, parts: Parts, variance: Variance) -> dict[str, Any]:
        """Return the p-weighted average over all clients that have shared parts; empty before the first."""
        if not (latest := self.latest):
            return {}
        return average([state for state, _ in latest], [count for _, count in latest], parts, variance)
