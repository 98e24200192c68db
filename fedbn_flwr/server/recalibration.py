r"""Recalibration: BN statistics re-estimated from the clients' data, under the current global weights.

The field calls it "precise BN". No data of the server's is used, and training does not see the result.

## Algorithm

The server asks every client with data for the count, the mean and the sum of squared deviations $(n_i, m_i, M_i)$ per
layer and channel (`batchnorm/reestimation.py`). It merges the answers in the order of partition ids, with $d = m_i -
m$:

$$M \leftarrow M + M_i + \frac{n \, n_i}{n + n_i} d^2, \qquad m \leftarrow m + \frac{n_i}{n + n_i} d, \qquad
n \leftarrow n + n_i$$

## What travels

| | before each test |
|---|---|
| sent down | the whole state (a method whose statistics are local: without them) |
| sent up | $m_i$ and $M_i$ of each BN layer, as many floats as its running statistics; an int64 count |
| cost | $F$ floats down (one broadcast), $S$ up per client, in one exchange before each test |

$S$ = floats of the running statistics.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedbn_flwr.batchnorm.averaging import State, check_finite
from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.batchnorm.reestimation import Moments, merge
from fedbn_flwr.errors import ReplyError

__all__ = ["from_entries", "pooled", "to_entries"]


def to_entries(moments: Mapping[str, Moments], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the entries to send: ``PATH.count`` (int64), ``PATH.mean`` and ``PATH.m2`` in the running mean's dtype.

    Args:
        moments: by path of the layer.
        like: the model's state dict.
    """
    entries: dict[str, torch.Tensor] = {}
    for path, own in moments.items():
        dtype = torch.promote_types(like[_join(path, "running_mean")].dtype, torch.float32)
        entries[_join(path, "count")] = torch.tensor(own.count)
        entries[_join(path, "mean")] = own.mean.to(dtype)
        entries[_join(path, "m2")] = own.m2.to(dtype)
    return entries


def from_entries(state: State, like: State, parts: Parts) -> dict[str, Moments]:
    """Return a client's moments by layer; layers that it did not call are left out.

    Args:
        state: the entries that the client sent.
        like: the global state.
        parts: the split of the global state.

    Raises:
        ReplyError: an entry is missing, unknown, misshapen or not finite, a count is below 1, an M2 negative.
    """
    check_finite(state)
    found: dict[str, Moments] = {}
    left = dict(state)
    for layer in parts.layers:
        names = [_join(layer.path, leaf) for leaf in ("count", "mean", "m2")]
        mine = [left.pop(name) for name in names if name in left]
        if not mine:
            continue
        if len(mine) < len(names) or "running_mean" not in layer.entries:
            raise ReplyError(f"layer '{layer.path}': count, mean, m2 and running statistics needed")
        count, mean, m2 = mine
        expected = like[layer.entries["running_mean"]].shape
        if count.shape != () or count.dtype.kind != "i" or mean.shape != expected or m2.shape != expected:
            shapes = f"{count.dtype} {count.shape}, {mean.shape}, {m2.shape}"
            raise ReplyError(f"layer '{layer.path}': {shapes} sent; int64 (), {expected}, {expected} needed")
        if count < 1 or (m2 < 0).any():
            raise ReplyError(f"layer '{layer.path}': count is {count}, the smallest M2 {m2.min()}")
        wide = (torch.from_numpy(np.array(array, dtype=np.float64)) for array in (mean, m2))
        found[layer.path] = Moments(int(count), *wide)
    if left:
        raise ReplyError(f"'{next(iter(left))}' ({len(left)} such) belongs to no BatchNorm layer")
    return found


def pooled(replies: Sequence[Mapping[str, Moments]], like: State, parts: Parts) -> dict[str, Any]:
    """Return the running statistics of all clients' data together, by entry, in the global state's dtypes.

    A layer with fewer than two values is left out, and so are counters, which count training batches.
    """
    entries: dict[str, Any] = {}
    for layer in parts.layers:
        own = [reply[layer.path] for reply in replies if layer.path in reply]
        if own and (total := functools.reduce(merge, own)).count > 1:
            for leaf, value in (("running_mean", total.mean), ("running_var", total.variance)):
                name = layer.entries[leaf]
                entries[name] = value.numpy().astype(like[name].dtype)
    return entries


def _join(path: str, leaf: str) -> str:
    return f"{path}.{leaf}" if path else leaf
