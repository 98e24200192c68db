"""Checks of a state dict without data.

They check counters, running statistics and a split by names.

The state may come from a file of torch (``.safetensors``, ``.pt``, ``.pth``) or NumPy
(``.npz`` with names).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedbn_flwr.batchnorm.parts import Part, Parts
from fedbn_flwr.doctor.thresholds import EXPLODING_VARIANCE, NO_VARIANCE
from fedbn_flwr.errors import StateError
from fedbn_flwr.training.model_state import wrapper_prefix
from fedbn_flwr.training.state_file import Opened, load_file, open_state

STATE_FILES = (".safetensors", ".pt", ".pth", ".npz")

TensorState = Mapping[str, Tensor]
"""A state dict, or some of its entries, by name."""


def read_state_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name, see ``open_file``."""
    return open_file(path).entries


def open_file(path: Path) -> Opened:
    """Return the one state in a file, and its place.

    Raises:
        StateError: the file is missing or has another format; or the file contains
            objects of other classes, several states, or no tensors.
    """
    if path.suffix not in STATE_FILES or not path.is_file():
        raise StateError(
            f"{path} is not a file of a saved state. Pass a file that ends in"
            f" {', '.join(STATE_FILES)}."
        )
    try:
        content = load_file(path)
    except Exception as error:  # a damaged file may raise anything in these readers
        raise StateError(
            f"{path} cannot be read: {type(error).__name__}: {error}. Save only the"
            " weights: torch.save(model.state_dict(), path)."
        ) from error
    opened = open_state(content)
    if opened.several:
        raise StateError(
            f"{path} contains several states: {', '.join(opened.several)}. Save only one"
            f" of them, for example torch.load(path)[{opened.several[0]!r}]."
        )
    if not opened.entries:
        raise StateError(
            f"{path} contains no tensors. Save them with"
            " torch.save(model.state_dict(), path)."
        )
    return opened


def named(state: TensorState, like: TensorState) -> dict[str, Tensor]:
    """Return a state under the names of a model, without a wrapper's prefix.

    Raises:
        StateError: entries are missing or unknown, or differ in shape from the model's.
    """
    prefix = wrapper_prefix([*state], [*like])
    state = {name.removeprefix(prefix): value for name, value in state.items()}
    missing, unknown = sorted({*like} - {*state}), sorted({*state} - {*like})
    shapes = []
    for name, value in like.items():
        if name in state and state[name].shape != value.shape:
            shapes.append(name)
    wrong = [*missing, *unknown, *shapes]
    if wrong:
        raise StateError(
            "the saved state does not fit the model: missing entries:"
            f" {len(missing)}, unknown: {len(unknown)}, of another shape: {len(shapes)}"
            f" (first: {wrong[0]!r}). Name the model of the saved state. A"
            " list of arrays without names cannot be read."
        )
    return state


def averaged_counters(parts: Parts, state: TensorState) -> dict[str, str]:
    """Return the values of invalid counters by name.

    Valid counters are integers of at least 0. An average of counters is a float:
    9.999999 loads as 9 into an int64 buffer, and ``momentum=None`` then averages
    wrongly. An average that was truncated to an integer cannot be detected.
    """
    wrong = {}
    for name in parts.counters:
        value = state[name]
        if value.is_floating_point():
            dtype = str(value.dtype).removeprefix("torch.")
            wrong[name] = f"{float(value):.10g} ({dtype})"
        elif int(value) < 0:
            wrong[name] = str(int(value))
    return wrong


def unusable_statistics(
    parts: Parts, state: TensorState, names: Collection[str]
) -> dict[str, str]:
    """Return the faults of entries that make a test meaningless, by name.

    The faults are NaN or infinity in the entries ``names``, and negative values in any
    running variance.
    """
    seen = {}
    for name in names:
        values = state[name]
        bad = int((~torch.isfinite(values)).sum())
        if bad:
            seen[name] = [f"{bad} of {values.numel()} values are not finite"]
    for _, variance in parts.moments():
        values = state[variance]
        negative = values[values < 0]
        if len(negative):
            what = (
                f"{len(negative)} of {values.numel()} are negative, down to"
                f" {float(negative.min()):.3g}"
            )
            seen.setdefault(variance, []).append(what)
    return {name: "; ".join(what) for name, what in seen.items()}


def variance_extremes(
    parts: Parts, state: TensorState, eps: Mapping[str, float]
) -> dict[str, tuple[int, int, int]]:
    """Return the numbers of channels with an extreme variance, by layer.

    The three numbers are the channels with a variance near zero, the channels with a
    variance above 1e8, and all channels. Layers without an extreme are left out. If the
    variance is below eps, BatchNorm divides by sqrt(eps), independently of the data. A
    large eps is a choice of the model.

    Args:
        parts: the split of the state.
        state: the state.
        eps: eps of each layer by path; 1e-5, torch's default, if it is unknown.
    """
    by_layer = {}
    for layer in parts.layers:
        if "running_var" not in layer.entries:
            continue
        values = state[layer.entries["running_var"]].double()
        least = min(eps.get(layer.path, NO_VARIANCE), NO_VARIANCE)
        # Leave out negative variances, because another finding reports them.
        low = int(((values >= 0) & (values < least)).sum())
        high = int((values > EXPLODING_VARIANCE).sum())
        if low or high:
            by_layer[layer.path] = (low, high, values.numel())
    return by_layer


def unmoved(parts: Parts, state: TensorState) -> dict[str, int]:
    """Return the counters of layers with initial running statistics, by path.

    The initial running statistics are mean 0 and variance 1. Layers that have not
    counted a batch, or have no counter, are left out.
    """
    by_layer = {}
    for layer in parts.layers:
        entries = layer.entries
        if not {"running_mean", "running_var", "num_batches_tracked"} <= {*entries}:
            continue
        mean, variance = state[entries["running_mean"]], state[entries["running_var"]]
        counter = state[entries["num_batches_tracked"]]
        if int(counter) > 0 and bool((mean == 0).all() and (variance == 1).all()):
            # An averaged counter may be a float.
            by_layer[layer.path] = round(float(counter))
    return by_layer


@dataclass(frozen=True)
class Missed:
    """BatchNorm entries that a split shares by mistake, see ``missed_entries``.

    Attributes:
        entries: the missed entries.
        layers: paths of the layers with a missed entry.
        num_layers: number of BatchNorm layers in the model.
        kept_layers: number of layers with an entry that the split keeps.
    """

    entries: list[str]
    layers: list[str]
    num_layers: int
    kept_layers: int


def missed_entries(parts: Parts, local: Collection[str]) -> Missed:
    """Return the BatchNorm entries that should also be local.

    Gamma and beta form one pair, mean and variance another: FedBN keeps both pairs,
    SiloBN the statistics, MTFL gamma and beta. If the split keeps no entry of a pair,
    the pair is shared on purpose. If the split keeps nothing at all, both pairs should
    be local.

    Args:
        parts: the split by layer type.
        local: names of the entries that stay with the client.
    """
    kept = {*local}
    # Select gamma and beta, or mean and variance, if the split keeps at least one entry
    # of this pair.
    wanted = [
        part
        for part in (Part.AFFINE, Part.STATISTICS)
        if not kept.isdisjoint(parts.select([part]))
    ]
    candidates = parts.select(wanted or [Part.AFFINE, Part.STATISTICS])
    entries = [name for name in candidates if name not in kept]

    layers, kept_layers = [], 0
    for layer in parts.layers:
        names = {*layer.entries.values()}
        if not names.isdisjoint(entries):
            layers.append(layer.path)
        if not names.isdisjoint(kept):
            kept_layers += 1

    return Missed(entries, layers, len(parts.layers), kept_layers)
