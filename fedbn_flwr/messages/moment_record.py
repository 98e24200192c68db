"""The moments of BatchNorm layers as entries of a message.

Each layer has the entries ``PATH.count``, ``PATH.mean`` and ``PATH.m2``. Class moments
have the entries ``counts``, and ``PATH.first`` and ``PATH.second`` of each layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from fedbn_flwr.batchnorm.array_types import State
from fedbn_flwr.batchnorm.averaging import check_finite
from fedbn_flwr.batchnorm.class_moments import ClassMoments
from fedbn_flwr.batchnorm.parts import Parts, entry_name
from fedbn_flwr.batchnorm.reestimation import Moments
from fedbn_flwr.errors import ReplyError

COUNTS = "counts"
"""The entry of class moments with the number of examples of each class."""


def encode_moments(
    moments: Mapping[str, Moments], like: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the entries to send, with an int64 count per layer.

    Mean and M2 have the dtype of the running mean, but at least float32.

    Args:
        moments: by path of the layer.
        like: the model's state dict.
    """
    entries: dict[str, torch.Tensor] = {}
    for path, of_layer in moments.items():
        # Use at least float32, because NumPy has no bfloat16.
        running_mean = like[entry_name(path, "running_mean")]
        dtype = torch.promote_types(running_mean.dtype, torch.float32)
        entries[entry_name(path, "count")] = torch.tensor(of_layer.count)
        entries[entry_name(path, "mean")] = of_layer.mean.to(dtype)
        entries[entry_name(path, "m2")] = of_layer.m2.to(dtype)
    return entries


def decode_moments(state: State, like: State, parts: Parts) -> dict[str, Moments]:
    """Return a client's moments by layer, without layers that it did not call.

    Args:
        state: the entries that the client sent.
        like: the global state.
        parts: the split of the global state.

    Raises:
        ReplyError: an entry is missing, unknown, misshapen or not finite, a count is
            below 1, an M2 negative.
    """
    check_finite(state)
    moments: dict[str, Moments] = {}
    left = dict(state)
    for layer in parts.layers:
        # A layer needs all three entries; a part of them is meaningless.
        names = [entry_name(layer.path, leaf) for leaf in ("count", "mean", "m2")]
        sent = [left.pop(name) for name in names if name in left]
        if not sent:
            continue
        if len(sent) < len(names) or "running_mean" not in layer.entries:
            raise ReplyError(
                f"the reply lacks count, mean or m2 of layer '{layer.path}', or the"
                " layer has no running statistics at the server. The client's model"
                " differs from the server's model."
            )

        # Check the numbers first, because a count of 0 or a negative M2 would give NaN.
        count, mean, m2 = sent
        expected = like[layer.entries["running_mean"]].shape
        kinds = "".join(one.dtype.kind for one in sent)
        if (
            count.shape
            or kinds != "iff"
            or mean.shape != expected
            or m2.shape != expected
        ):
            shapes = ", ".join(f"{one.dtype} {one.shape}" for one in sent)
            raise ReplyError(
                f"layer '{layer.path}': the client sent {shapes}; it must send int64"
                f" (), and two floating arrays {expected}"
            )
        if count < 1 or (m2 < 0).any():
            raise ReplyError(
                f"layer '{layer.path}': the count is {count} and the smallest M2 is"
                f" {m2.min()}. The count must be at least 1, and M2 not negative."
            )

        # Use float64, because sums of squares over many clients cancel in float32.
        moments[layer.path] = Moments(
            int(count),
            torch.from_numpy(np.array(mean, dtype=np.float64)),
            torch.from_numpy(np.array(m2, dtype=np.float64)),
        )
    # If entries are left, the client has another model, and only a part of it fits.
    if left:
        raise ReplyError(
            f"'{next(iter(left))}' ({len(left)} such) is not from a BatchNorm layer"
        )
    return moments


def encode_moments_of_classes(moments: ClassMoments) -> dict[str, torch.Tensor]:
    """Return the entries to send, in float64."""
    entries = {COUNTS: moments.counts}
    for path, first in moments.first.items():
        entries[entry_name(path, "first")] = first
        entries[entry_name(path, "second")] = moments.second[path]
    return entries


def decode_moments_of_classes(state: State, like: State) -> ClassMoments:
    """Return a client's class moments.

    Args:
        state: the entries that the client sent.
        like: the global state.

    Raises:
        ReplyError: an entry is missing, unknown, misshapen or not finite, or a count or
            a sum of squares is negative.
    """
    check_finite(state)
    left = {name: torch.from_numpy(np.array(one)) for name, one in state.items()}
    counts = left.pop(COUNTS, torch.zeros(()))
    fits = counts.dim() == 1 and bool((counts >= 0).all()) and bool(counts.sum())
    first, second = {}, {}
    for name in [name for name in left if name.endswith("first")]:
        path = name.removesuffix("first").removesuffix(".")
        other = left.pop(entry_name(path, "second"), counts)
        mean = like.get(entry_name(path, "running_mean"))
        first[path], second[path] = left.pop(name), other
        shape = None if mean is None else (*counts.shape, *mean.shape)
        fits = fits and first[path].shape == shape == other.shape
        fits = fits and bool((other >= 0).all())
    if left or not first or not fits:
        raise ReplyError(
            "the reply does not have the class moments of the server's model: counts"
            " (classes,), and first and second (classes, channels) of each BatchNorm"
            " layer. Use a TorchClient with the server's model."
        )
    return ClassMoments(counts, first, second)
