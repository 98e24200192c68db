r"""What clients sum under masks, as values by name: their update, SGD's buffers, re-estimated statistics. NumPy only.

Every client sends the same names and shapes, whatever it has done, so that a sum is defined. The sum is weighted by
$|D_i|$ (``privacy.ring``).

A client's re-estimated statistics of a layer are $(n_i, m_i, M_i)$ (``messages.moments``). With the layer's global
mean $m$, variance $v$ and $e$ as in ``privacy.coordinates`` it sends

$$l_i = \log_2 \frac{n_i}{|D_i|}, \qquad l_i^2, \qquad a_i = \frac{m_i - m}{\sqrt{v + e}}, \qquad
b_i = \frac{M_i / n_i}{v + e} + a_i^2$$

If all clients have the same number of values per example, $l_i = l$, then with $\bar a$, $\bar b$ the weighted means
the statistics of all data together have the mean $m + \bar a \sqrt{v + e}$, and the biased variance $(\bar b - \bar
a^2) (v + e)$. Images of different sizes are refused: the variance of $l_i$ shows them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from fedbn_flwr.batchnorm.averaging import Array, State
from fedbn_flwr.batchnorm.parts import Parts, split_state
from fedbn_flwr.batchnorm.reestimation import Moments
from fedbn_flwr.errors import MaskingError, ReplyError
from fedbn_flwr.messages.moments import decode_moments
from fedbn_flwr.privacy.coordinates import Coordinates, E

__all__ = ["about", "buffers_of", "model_values", "pooled_statistics", "statistics_like", "statistics_values"]

_BUFFER = "momentum|"
_NOT_CALLED = -128.0  # l of a layer that the client did not call


def about(total: float, equal: bool) -> str:
    """Return what the clients are told of a sum, as a text: the sum of the weights, and how they weigh."""
    return f"{total!r}|{'equal' if equal else 'examples'}"


def model_values(
    before: State, state: State, buffers: State | None = None, parts: Parts | None = None
) -> dict[str, Array]:
    """Return the update of a client and its buffers.

    Args:
        before: the shared entries of the global state before the round.
        state: the client's state.
        buffers: SGD's buffers, zero where the client has none; None = they are not sent.
        parts: the split of the global state; by default made from names.

    Raises:
        MaskingError: a buffer does not fit the model.
    """
    named = split_state(before)
    values = Coordinates(before, parts or named, scale=1.0).update(state)
    if buffers is None:
        return values
    trainable = [name for name in (*named.affine, *named.rest) if before[name].dtype.kind == "f"]
    for name, array in buffers.items():
        if name not in trainable or array.shape != before[name].shape:
            raise MaskingError(f"buffer '{name}' of shape {array.shape} does not fit the model")
    return values | {_BUFFER + name: buffers.get(name, np.zeros(before[name].shape)) for name in trainable}


def buffers_of(values: Mapping[str, Array], before: State) -> dict[str, Array]:
    """Return the averaged buffers among the values."""
    names = {name.removeprefix(_BUFFER): name for name in values if name.startswith(_BUFFER)}
    return {name: values[key].astype(before[name].dtype) for name, key in names.items()}


def statistics_values(entries: State, num_examples: int, before: State) -> dict[str, Array]:
    """Return the values of a client's re-estimated statistics.

    Args:
        entries: ``PATH.count``, ``PATH.mean`` and ``PATH.m2`` of each layer that the client called.
        num_examples: |D_i|.
        before: the global state; its split is made from names.

    Raises:
        ReplyError: the entries do not fit the model.
    """
    moments, values = decode_moments(entries, before, split_state(before)), dict[str, Array]()
    for path, mean, unit in _layers(before):
        of_layer = moments.get(path)
        if of_layer is None:
            level, a, b = _NOT_CALLED, np.zeros_like(mean), np.zeros_like(mean)
        else:
            level = float(np.log2(of_layer.count / num_examples))
            a = (of_layer.mean.numpy() - mean) / np.sqrt(unit)
            b = of_layer.m2.numpy() / of_layer.count / unit + a**2
        values |= {f"{path}|l": np.array([level, level**2]), f"{path}|a": a, f"{path}|b": b}
    return values


def statistics_like(before: State) -> dict[str, Array]:
    """Return arrays like the values of re-estimated statistics."""
    return statistics_values({}, 1, before)


def pooled_statistics(values: Mapping[str, Array], total: float, before: State) -> dict[str, Moments]:
    """Return the moments of all clients' data together, by layer.

    Args:
        values: the weighted means of the clients' values.
        total: the sum of their |D_i|.
        before: the global state; its split is made from names.

    Raises:
        ReplyError: the clients have different numbers of values per example in a layer.
    """
    moments = {}
    for path, mean, unit in _layers(before):
        level, square = values[f"{path}|l"]
        if abs(square - level**2) > 1e-6:
            raise ReplyError(
                f"layer '{path}' has different numbers of values per example at the clients (for "
                "example images of different sizes), and masked statistics need equal ones"
            )
        if level < _NOT_CALLED / 2:
            continue
        count = round(2.0**level * total)
        a, b = values[f"{path}|a"], values[f"{path}|b"]
        variance = np.maximum(b - a**2, 0.0) * unit
        moments[path] = Moments(count, torch.from_numpy(mean + a * np.sqrt(unit)), torch.from_numpy(count * variance))
    return moments


def _layers(before: State) -> list[tuple[str, Array, Array]]:
    """Return path, running mean and v + e, float64, of each layer with running statistics."""
    layers = []
    for layer in split_state(before).layers:
        if {"running_mean", "running_var"} <= layer.entries.keys():
            mean, variance = (
                before[layer.entries[leaf]].astype(np.float64) for leaf in ("running_mean", "running_var")
            )
            layers.append((layer.path, mean, variance + E))
    return layers
