"""What a strategy does with a model, foretold: shared, kept and frozen parts, floats, bytes and exchanges per round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import nn

from fedbn_flwr.records import to_state
from fedbn_flwr.state import Part, Parts, split_state
from fedbn_flwr.strategies import STRATEGIES
from fedbn_flwr.strategies.report import Traffic

__all__ = ["Inspection", "inspect_model"]


@dataclass(frozen=True)
class Inspection:
    """The foreseen cost of a strategy on a model.

    Attributes:
        parts: the split of the model's state.
        floats: number of floating entries' elements by part.
        counters: number of elements of integer entries by part.
        local: the parts that stay with the clients.
        first: traffic of a round in which no client has had the common start.
        later: traffic of every other round.
        warnings: where the method would do nothing, or part of it.
    """

    parts: Parts
    floats: Mapping[Part, int]
    counters: Mapping[Part, int]
    local: frozenset[Part]
    first: Traffic
    later: Traffic
    warnings: tuple[str, ...]


def inspect_model(model: nn.Module, strategy: str, num_clients: int) -> Inspection:
    """Foretell what ``strategy`` moves per training round between the server and ``num_clients`` clients.

    Raises:
        KeyError: the strategy is not in ``STRATEGIES``.
    """
    method = STRATEGIES[strategy]
    parts = split_state(model)
    floats, counters = dict.fromkeys(Part, 0), dict.fromkeys(Part, 0)
    shared, everything = [0, 0], [0, 0]
    for name, array in to_state(model.state_dict()).items():
        part = parts.part_of[name]
        is_float = bool(np.issubdtype(array.dtype, np.inexact))
        (floats if is_float else counters)[part] += array.size
        kind = 0 if is_float else 1
        everything[kind] += array.nbytes
        if part not in method.local:
            shared[kind] += array.nbytes
    first = Traffic(1, everything[0], num_clients * shared[0], everything[1], num_clients * shared[1])
    later = Traffic(1, shared[0], num_clients * shared[0], shared[1], num_clients * shared[1])
    return Inspection(parts, floats, counters, method.local, first, later, _warnings(parts, strategy))


def _warnings(parts: Parts, strategy: str) -> tuple[str, ...]:
    method = STRATEGIES[strategy]
    found = []
    if not parts.layers and method.needs_batchnorm:
        found.append(f"the model has no BatchNorm: {strategy} would do what fedavg does")
    no_affine = [layer.path for layer in parts.layers if "weight" not in layer.entries]
    if no_affine and Part.AFFINE in method.local:
        found.append(f"{len(no_affine)} BN layer(s) have no gamma and beta to keep: {', '.join(no_affine[:3])}")
    no_statistics = [layer.path for layer in parts.layers if "running_mean" not in layer.entries]
    if no_statistics:
        found.append(
            f"{len(no_statistics)} BN layer(s) track no running statistics and use the batch's own in testing: "
            + ", ".join(no_statistics[:3])
        )
    return tuple(found)
