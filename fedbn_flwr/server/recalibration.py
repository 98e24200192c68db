r"""Recalibration: BN statistics re-estimated from the clients' data, under the current global weights.

The field calls it "precise BN". No data of the server's is used, and training does not see the result.

## Algorithm

The server asks every client with data for the count, the mean and the sum of squared deviations $(n_i, m_i, M_i)$ per
layer and channel (`batchnorm/reestimation.py`). It merges the answers, in the order of partition ids:

$$n = \sum_i n_i, \qquad m = \sum_i \frac{n_i}{n} m_i, \qquad M = \sum_i \left( M_i + n_i (m_i - m)^2 \right)$$

## What travels

| | before each test |
|---|---|
| sent down | the whole state (a method whose statistics are local: without them) |
| sent up | $m_i$ and $M_i$ of each BN layer, as many floats as its running statistics; an int64 count |
| cost | $F$ floats down (one broadcast), $S$ up per client, in one exchange before each test |

$S$ = floats of the running statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.batchnorm.reestimation import Moments, merge

__all__ = ["running_statistics_of"]


def running_statistics_of(replies: Sequence[Mapping[str, Moments]], like: State, parts: Parts) -> dict[str, Any]:
    """Return the running statistics of all clients' data together, by entry, in the global state's dtypes.

    A layer with fewer than two values is left out, and so are counters, which count training batches.
    """
    entries: dict[str, Any] = {}
    for layer in parts.layers:
        own = [reply[layer.path] for reply in replies if layer.path in reply]
        if own and (total := merge(own)).count > 1:
            for leaf, value in (("running_mean", total.mean), ("running_var", total.variance)):
                name = layer.entries[leaf]
                entries[name] = value.numpy().astype(like[name].dtype)
    return entries
