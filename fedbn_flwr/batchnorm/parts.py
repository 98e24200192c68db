"""A model's state by layer type: AFFINE, STATISTICS, COUNTERS and REST.

Methods for BatchNorm differ in which of these parts they share. The split depends on
the types of the layers, not on the letters "bn" in a name: torchvision's ResNet has
three BN layers named ``downsample.1``, and in a ``Sequential`` every name is a number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from fedbn_flwr.batchnorm.outer_affine import outer_affine
from fedbn_flwr.training.freezing import stays_in_eval
from fedbn_flwr.training.modes import is_scripted_batchnorm

__all__ = [
    "BatchNormLayer",
    "Part",
    "Parts",
    "affine_elsewhere",
    "entry_name",
    "fixed_entries",
]
__all__ += ["learning_parts", "split_state"]


class Part(StrEnum):
    """One of the four parts of a model's state."""

    AFFINE = "affine"
    STATISTICS = "statistics"
    COUNTERS = "counters"
    REST = "rest"


_LEAF = {
    "weight": Part.AFFINE,
    "bias": Part.AFFINE,
    "running_mean": Part.STATISTICS,
    "running_var": Part.STATISTICS,
    "num_batches_tracked": Part.COUNTERS,
}

# of torch.nn.utils.parametrize: before the leaf whose entries follow
_PARAMETRIZED = "parametrizations."


def _part_of_leaf(leaf: str) -> Part:
    return _LEAF[leaf.removeprefix(_PARAMETRIZED).partition(".")[0]]


def entry_name(path: str, leaf: str) -> str:
    """Return the name of a layer's entry; the path is "" if the model itself is the
    layer.
    """
    return f"{path}.{leaf}" if path else leaf


@dataclass(frozen=True)
class BatchNormLayer:
    """One BatchNorm layer: its path ("" if the model itself is the layer), and its
    entry names by leaf name.
    """

    path: str
    entries: Mapping[str, str]


@dataclass(frozen=True)
class Parts:
    """The names of a state dict by part; each name is in exactly one part. Names keep
    the state dict's order.

    ``by_names``: the layers were found by names, not by their types.
    """

    names: tuple[str, ...]
    layers: tuple[BatchNormLayer, ...]
    by_names: bool = False

    @cached_property
    def part_of(self) -> Mapping[str, Part]:
        """The part of each entry."""
        parts = {
            name: _part_of_leaf(leaf)
            for layer in self.layers
            for leaf, name in layer.entries.items()
        }
        return {name: parts.get(name, Part.REST) for name in self.names}

    def select(self, parts: Iterable[Part]) -> tuple[str, ...]:
        """Return the names of the entries in ``parts``, in the state dict's order."""
        wanted = frozenset(parts)
        return tuple(name for name in self.names if self.part_of[name] in wanted)

    @cached_property
    def affine(self) -> tuple[str, ...]:
        """Gamma and beta of the BatchNorm layers."""
        return self.select([Part.AFFINE])

    @cached_property
    def statistics(self) -> tuple[str, ...]:
        """Running means and variances of the BatchNorm layers."""
        return self.select([Part.STATISTICS])

    @cached_property
    def counters(self) -> tuple[str, ...]:
        """``num_batches_tracked`` of the BatchNorm layers (int64, 0-dim)."""
        return self.select([Part.COUNTERS])

    @cached_property
    def rest(self) -> tuple[str, ...]:
        """All other entries."""
        return self.select([Part.REST])

    def moments(self) -> Iterator[tuple[str, str]]:
        """Yield the names (running_mean, running_var) of each layer that has running
        statistics.
        """
        for layer in self.layers:
            if "running_mean" in layer.entries and "running_var" in layer.entries:
                yield layer.entries["running_mean"], layer.entries["running_var"]

    def named_layers(self) -> str:
        """Return the number and the first paths of the layers, for messages."""
        paths = [layer.path or "(the model itself)" for layer in self.layers]
        shown = ", ".join(paths[:2]) + (", ..." if len(paths) > 2 else "")
        return (
            f"{len(paths)} BatchNorm {'layer' if len(paths) == 1 else 'layers'}"
            f" ({shown})"
        )

    def fingerprint(self, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Return a SHA-256 of names, parts and shapes; a client's saved part is used
        only if it has the same one.
        """
        text = "\n".join(
            f"{name} {self.part_of[name]} {tuple(shapes[name])}" for name in self.names
        )
        return hashlib.sha256(text.encode()).hexdigest()


def fixed_entries(model: nn.Module) -> frozenset[str]:
    """Return the entries that local training does not change (see ``train_only``).

    These are parameters without ``requires_grad``, the statistics and counters of
    layers that are kept in eval mode, and floating buffers: a constant window, a mask.
    Excluded: buffers that training moves, of layers with running statistics and of
    spectral norm. A buffer with its own update rule is wrongly included; remove it.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    fixed = {
        name
        for name, p in model.named_parameters(remove_duplicate=False)
        if not p.requires_grad
    }
    parts, in_eval = split_state(model), stays_in_eval(model)
    for path, module in modules.items():
        buffers = dict(module.named_buffers(recurse=False))
        if not _moves_buffers(module, buffers):
            constant = (
                leaf
                for leaf, b in buffers.items()
                if b.is_floating_point() or b.is_complex()
            )
            fixed.update(
                {entry_name(path, leaf) for leaf in constant} & parts.part_of.keys()
            )
    for layer in parts.layers:
        if modules[layer.path] in in_eval:
            fixed.update(
                name
                for leaf, name in layer.entries.items()
                if _part_of_leaf(leaf) != Part.AFFINE
            )
    return frozenset(fixed)


def _moves_buffers(module: nn.Module, buffers: Mapping[str, Any]) -> bool:
    """Return whether a module's buffers move in training: running statistics, or the
    vectors of spectral norm.
    """
    hooks = module._forward_pre_hooks.values()
    spectral = isinstance(module, _SpectralNorm) or any(
        isinstance(hook, SpectralNorm) for hook in hooks
    )
    return spectral or any(leaf.startswith("running_") for leaf in buffers)


def tied_entries(model: nn.Module) -> dict[str, str]:
    """Return the entries that are the same tensor as an earlier one, each with the name
    of the first.
    """
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(tensor), name)
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    return {name: other for name, other in names.items() if name != other}


def learning_parts(model: nn.Module) -> Parts:
    """Return the split of a model in which BatchNorm has only the entries that training
    changes (see ``train_only``).

    The ``fixed_entries`` are in REST.
    """
    parts, fixed = split_state(model), fixed_entries(model)
    layers = []
    for layer in parts.layers:
        learning = {
            leaf: name for leaf, name in layer.entries.items() if name not in fixed
        }
        if learning:
            layers.append(BatchNormLayer(layer.path, learning))
    return Parts(parts.names, tuple(layers))


def split_state(model_or_state_dict: nn.Module | Mapping[str, Any]) -> Parts:
    """Return the split of a model's state into AFFINE, STATISTICS, COUNTERS and REST.

    In a model, layers are found by type: BatchNorm1d/2d/3d, SyncBatchNorm, lazy layers
    and every subclass. In a bare state dict (any mapping of names), a layer counts as
    BatchNorm if it has ``<prefix>.running_mean``. Names alone cannot tell an
    InstanceNorm with running statistics from a BatchNorm, or a BatchNorm without
    running statistics from any other affine layer. If that matters, pass the model.

    Gamma and beta around a layer without its own are AFFINE where the layer's owner
    applies them right after it, see ``outer_affine``.

    The entries of a parametrization of gamma or beta (``torch.nn.utils.parametrize``)
    are AFFINE. What a subclass has beside BatchNorm's own entries is REST.
    """
    by_names = not isinstance(model_or_state_dict, nn.Module)
    if isinstance(model_or_state_dict, nn.Module):
        names = tuple(model_or_state_dict.state_dict(keep_vars=True))
        # remove_duplicate=False: a layer registered at two paths is twice in the state
        # dict.
        modules = dict(model_or_state_dict.named_modules(remove_duplicate=False))
        paths = [
            path
            for path, m in modules.items()
            if isinstance(m, _BatchNorm) or is_scripted_batchnorm(m)
        ]
    else:
        names, modules = tuple(model_or_state_dict), {}
        leaf = "running_mean"
        paths = [
            n.removesuffix(leaf).removesuffix(".")
            for n in names
            if n == leaf or n.endswith("." + leaf)
        ]
    known = frozenset(names)
    parametrized = _parametrized(names)
    layers = []
    for path in paths:
        entries = {
            leaf: entry_name(path, leaf)
            for leaf in (*_LEAF, *parametrized.get(path, ()))
        }
        if modules:
            entries |= _owned_outside(modules, path)
        layers.append(
            BatchNormLayer(
                path, {leaf: name for leaf, name in entries.items() if name in known}
            )
        )
    return Parts(names, tuple(layers), by_names)


def _owned_outside(modules: Mapping[str, nn.Module], path: str) -> dict[str, str]:
    """Return the names of gamma and beta that a layer has beside BatchNorm's own, or
    that its owner has, by leaf.
    """
    parent, _, name = path.rpartition(".")
    for owner, layer in ((path, ""), (parent, name)):
        if found := outer_affine(modules[owner], layer):
            return {leaf: entry_name(owner, own) for leaf, own in found.items()}
    return {}


def affine_elsewhere(
    parts: Parts, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[str]]:
    """Return the entries of REST that may be gamma and beta of a BatchNorm layer
    without its own, by the layer's path.

    They have one dimension and the layer's channels, and belong to the layer or to the
    module that owns it. Names do not tell whether they are applied to its output.
    """
    found: dict[str, list[str]] = {}
    for layer in parts.layers:
        mean = layer.entries.get("running_mean")
        if mean is None or any(
            _part_of_leaf(leaf) == Part.AFFINE for leaf in layer.entries
        ):
            continue
        owners = (layer.path, layer.path.rpartition(".")[0])
        near = [
            name
            for name in parts.rest
            if name.rpartition(".")[0] in owners and shapes[name] == shapes[mean]
        ]
        if near:
            found[layer.path] = near
    return found


def _parametrized(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the leaves of parametrized entries by the path of their module, if
    BatchNorm has such an entry.
    """
    leaves: dict[str, list[str]] = {}
    for name in names:
        path, mark, leaf = f".{name}".partition(f".{_PARAMETRIZED}")
        if mark and leaf.partition(".")[0] in _LEAF:
            leaves.setdefault(path.removeprefix("."), []).append(_PARAMETRIZED + leaf)
    return leaves
