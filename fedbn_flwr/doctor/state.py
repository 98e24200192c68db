"""What a state dict alone shows: counters, running statistics, and a split by names.

It may be read from a file: ``.safetensors``, ``.pt`` and ``.pth`` of torch, ``.npz`` of
NumPy with names.
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
from fedbn_flwr.training.state_file import load_file, open_state

__all__ = [
    "STATE_FILES",
    "Missed",
    "TensorState",
    "averaged_counters",
    "missed_entries",
    "named",
    "read_state_file",
    "unmoved",
    "unusable_statistics",
    "variance_extremes",
]

STATE_FILES = (".safetensors", ".pt", ".pth", ".npz")

TensorState = Mapping[str, Tensor]
"""A state dict, or entries of one, by name."""


def read_state_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name.

    Raises:
        StateError: the file is absent, of another format, or holds more than tensors.
    """
    if path.suffix not in STATE_FILES or not path.is_file():
        raise StateError(
            f"{path} is no file of a saved state. Give one that ends in"
            f" {', '.join(STATE_FILES)}."
        )
    try:
        content = load_file(path)
    except Exception as error:  # a damaged file may raise anything in these readers
        raise StateError(
            f"{path} cannot be read: {type(error).__name__}: {error}. Save the weights"
            " alone: torch.save(model.state_dict(), path)."
        ) from error
    entries, _, several, _ = open_state(content)
    if several:
        raise StateError(
            f"{path} holds several states: {', '.join(several)}. Save one of them"
            " alone."
        )
    if not entries:
        raise StateError(
            f"{path} holds no tensors, as torch.save(model.state_dict(), path) does."
        )
    return entries


def named(state: TensorState, like: TensorState) -> dict[str, Tensor]:
    """Return a state under the names of a model's, without a wrapper's prefix.

    Raises:
        StateError: entries are missing, unknown, or of another shape than the model's.
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
            f"the saved state does not fit the model: {len(missing)} entries are"
            f" missing, {len(unknown)} unknown, {len(shapes)} of another shape (first:"
            f" {wrong[0]!r}). Name the model that it was saved"
            " from; a list of arrays without names cannot be read."
        )
    return state


def averaged_counters(parts: Parts, state: TensorState) -> dict[str, str]:
    """Return what the counters hold that are no whole number of at least 0, by name.

    A mean of counters is a float: 9.999999 loads as 9 into an int64 buffer, and with it
    ``momentum=None`` averages wrongly. A counter that was cut off to an integer cannot
    be seen.
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
    """Return what is wrong with entries that make a test nonsense, by name.

    They are the entries of these names with NaN or infinity, and all negative running
    variances.
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
    """Return channels with a variance near zero, above 1e8, and all, by layer.

    Layers with neither are left out. Below eps BatchNorm divides by sqrt(eps), which no
    longer depends on the data. A large eps is a choice of the model.

    Args:
        parts: the split of the state.
        state: the state.
        eps: of each layer by path; 1e-5, torch's default, if it is not known.
    """
    by_layer = {}
    for layer in parts.layers:
        if "running_var" not in layer.entries:
            continue
        values = state[layer.entries["running_var"]].double()
        least = min(eps.get(layer.path, NO_VARIANCE), NO_VARIANCE)
        # A negative variance is a finding of its own.
        low = int(((values >= 0) & (values < least)).sum())
        high = int((values > EXPLODING_VARIANCE).sum())
        if low or high:
            by_layer[layer.path] = (low, high, values.numel())
    return by_layer


def unmoved(parts: Parts, state: TensorState) -> dict[str, int]:
    """Return the batches counted by layers with mean 0 and variance 1, by path.

    Those are the first running statistics. A layer that has not counted a batch is left
    out, and one that has no counter.
    """
    by_layer = {}
    for layer in parts.layers:
        entries = layer.entries
        if not {"running_mean", "running_var", "num_batches_tracked"} <= {*entries}:
            continue
        mean, variance = state[entries["running_mean"]], state[entries["running_var"]]
        counter = state[entries["num_batches_tracked"]]
        if int(counter) > 0 and bool((mean == 0).all() and (variance == 1).all()):
            # A counter may be the float of an average.
            by_layer[layer.path] = round(float(counter))
    return by_layer


@dataclass(frozen=True)
class Missed:
    """BatchNorm entries that a split shares, although it keeps others of the same part.

    Attributes:
        entries: the missed entries.
        layers: paths of the layers with a missed entry.
        num_layers: BatchNorm layers of the model.
        kept_layers: those of which the split keeps an entry.
        by_letters: the letters ("bn", "norm") of a filter on names that keeps exactly
            these layers; "" if none does.
    """

    entries: list[str]
    layers: list[str]
    num_layers: int
    kept_layers: int
    by_letters: str


def missed_entries(parts: Parts, local: Collection[str]) -> Missed:
    """Return the BatchNorm entries that should be local besides the ones that are.

    Gamma and beta belong together, and mean and variance do: FedBN keeps both pairs,
    SiloBN the statistics, MTFL gamma and beta. A pair of which the split keeps nothing
    is meant to be shared, unless it keeps nothing at all.

    Args:
        parts: the split by layer type.
        local: names of the entries that stay with the client.
    """
    kept = {*local}
    # The pairs that the split keeps, at least in part.
    wanted = [
        part
        for part in (Part.AFFINE, Part.STATISTICS)
        if not kept.isdisjoint(parts.select([part]))
    ]
    candidates = parts.select(wanted or [Part.AFFINE, Part.STATISTICS])
    entries = [name for name in candidates if name not in kept]

    layers, with_any = [], []
    for layer in parts.layers:
        names = {*layer.entries.values()}
        if not names.isdisjoint(entries):
            layers.append(layer.path)
        if not names.isdisjoint(kept):
            with_any.append(layer.path)

    # The filter on names that keeps the same layers shows how the others were missed.
    by_letters = ""
    for letters in ("bn", "norm"):
        matching = [layer.path for layer in parts.layers if letters in layer.path]
        if layers and matching == with_any:
            by_letters = letters
            break
    return Missed(entries, layers, len(parts.layers), len(with_any), by_letters)
