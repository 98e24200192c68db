"""The split of a model's state into six parts.

The type of a layer determines the parts AFFINE, STATISTICS, COUNTERS and REST; names
determine PERSONAL and FIXED. Methods for BatchNorm differ in the parts that they share.
The split depends on the types of the layers, not on the letters "bn" in a name:
torchvision's ResNet has three BN layers named ``downsample.1``, and in a ``Sequential``
every name is a number.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from torch import nn

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.problems import Problem
from fedbn_flwr.training.freezing import layers_of
from fedbn_flwr.training.model_state import (
    HEADS,
    head_of,
    named_by_state,
    without_wrappers,
)

__all__ = [
    "LAST_LAYER",
    "BatchNormLayer",
    "Part",
    "Parts",
    "entry_name",
    "is_at",
    "near",
    "paths_in",
    "refuse_other_layers",
    "split_state",
    "tied_apart",
    "tied_entries",
]


class Part(StrEnum):
    """One of the six parts of a model's state."""

    AFFINE = "affine"
    STATISTICS = "statistics"
    COUNTERS = "counters"
    REST = "rest"
    PERSONAL = "personal"
    FIXED = "fixed"


_LEAF = {
    "weight": Part.AFFINE,
    "bias": Part.AFFINE,
    "running_mean": Part.STATISTICS,
    "running_var": Part.STATISTICS,
    "num_batches_tracked": Part.COUNTERS,
}

# Prefix of a pattern that is the name of a class instead of a path.
_TYPE = "type:"
# Pattern that selects the head, see ``training.model_state``.
LAST_LAYER = "last-layer"
# The names of the parameters of torch's layers.
_PARAMETER = re.compile(
    r"(^|\.)((in_proj_)?(weight|bias)|bias_[kv]|(weight|bias)_[ih]h_l\d+(_reverse)?)$"
)
# torch.nn.utils.parametrize puts this prefix before the name of the parameter.
_PARAMETRIZED = "parametrizations."


def entry_name(path: str, leaf: str) -> str:
    """Return the name of a layer's entry (path "" for the model itself)."""
    return f"{path}.{leaf}" if path else leaf


@dataclass(frozen=True)
class BatchNormLayer:
    """One BatchNorm layer.

    Attributes:
        path: its path; "" if the model itself is the layer.
        entries: the names of its entries in the state, by leaf, such as "weight".
    """

    path: str
    entries: Mapping[str, str]


@dataclass(frozen=True)
class Parts:
    """The names of a state dict by part. Each name is in exactly one part.

    Attributes:
        names: all names, in the state dict's order.
        layers: the BatchNorm layers that the method treats.
        by_names: whether the layers were found by names instead of types.
        averaged: the BatchNorm layers that the method does not treat. They are averaged
            as in FedAvg and belong to REST.
        personal: the PERSONAL entries, independent of their layers.
        fixed: the FIXED entries, which no client changes (``with_fixed``).
        types: the paths of the modules of each class, by the name of the class; empty
            in a split by names.
        tied: entries that share a tensor with an earlier entry, each with the name of
            the first entry with this tensor; empty in a split by names.
        buffers: the entries that no optimizer can train: buffers, and parameters
            without ``requires_grad``; empty in a split by names.
        parameters: the entries that are parameters; in a split by names, the entries
            that have the name of a parameter.
    """

    names: tuple[str, ...]
    layers: tuple[BatchNormLayer, ...]
    by_names: bool = False
    averaged: tuple[BatchNormLayer, ...] = ()
    personal: tuple[str, ...] = ()
    types: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)
    tied: Mapping[str, str] = field(default_factory=dict, compare=False)
    buffers: frozenset[str] = field(default=frozenset(), compare=False)
    parameters: frozenset[str] = field(default=frozenset(), compare=False)
    fixed: frozenset[str] = frozenset()

    @cached_property
    def whole(self) -> Parts:
        """The split by types, with all layers in ``layers`` and without PERSONAL."""
        layers = (*self.layers, *self.averaged)
        return replace(self, layers=layers, averaged=(), personal=())

    def only(self, layers: str | Sequence[str]) -> Parts:
        """Return the split with only these layers ("" keeps all layers).

        Raises:
            ConfigError: a path or glob matches no BatchNorm layer, or the split was
                made for other layers.
        """
        patterns = paths_in(layers)
        if not patterns:
            return self
        paths = [layer.path for layer in self.whole.layers]
        unknown = [one for one in patterns if not any(is_at(p, one) for p in paths)]
        if unknown:
            what = f"matches none of the {len(paths)} BatchNorm layers by path or glob"
            lines = [f"layers: {one!r} {what}. {near(one, paths)}" for one in unknown]
            raise ConfigError("\n".join(lines))
        # A layer that is used twice has two paths, with the same tensors.
        tensors = {
            layer.path: {self.tied.get(name, name) for name in layer.entries.values()}
            for layer in self.whole.layers
        }
        named = [
            tensors[path] for path in paths if any(is_at(path, p) for p in patterns)
        ]
        chosen: list[BatchNormLayer] = []
        averaged: list[BatchNormLayer] = []
        for layer in self.whole.layers:
            is_chosen = tensors[layer.path] in named
            (chosen if is_chosen else averaged).append(layer)
        parts = replace(self, layers=tuple(chosen), averaged=tuple(averaged))
        if self.averaged and parts.layers != self.layers:
            raise ConfigError(
                f"layers={layers!r} chooses {parts.named_layers()}, but parts= has"
                f" {self.named_layers()}. Give only one of the two."
            )
        return parts

    def with_personal(self, patterns: str | Sequence[str]) -> Parts:
        """Return the split with these entries, and no others, as PERSONAL.

        A pattern is a path or glob: "classifier.*", "features". "type:LayerNorm" means
        all entries below modules of this class or its subclasses. "last-layer" means
        the module that the model calls fc, classifier or head (``training.model_state``).

        Raises:
            ConfigError: a pattern has no entry, or the head has another name.
        """
        places = paths_in(patterns)
        unknown = [one for one in places if not self._entries_at(one)]
        if LAST_LAYER in unknown:
            tops = dict.fromkeys(name.partition(".")[0] for name in self.names)
            raise ConfigError(
                f"personal: '{LAST_LAYER}' needs exactly one module named"
                f" {', '.join(HEADS)} at the top of the model, but it has"
                f" {', '.join(tops)}. {self.instead_of_head()}"
            )
        if unknown:
            known = [*self.names, *(f"{_TYPE}{kind}" for kind in self.types)]
            lines = [
                f"personal: {one!r} matches no entry. {near(one, known)}"
                for one in unknown
            ]
            if self.by_names:
                lines.append("Classes can be used with parts=split_state(model).")
            raise ConfigError("\n".join(lines))
        chosen = {name for one in places for name in self._entries_at(one)}
        personal = tuple(name for name in self.names if name in chosen)
        # Return the same object if possible, because it keeps its cached values and
        # every round of a run calls this function.
        return self if personal == self.personal else replace(self, personal=personal)

    def with_fixed(self, names: frozenset[str]) -> Parts:
        """Return the split with these entries as FIXED, and without them in layers.

        A layer without other entries is not a layer of the method.

        Raises:
            ConfigError: an entry is PERSONAL, although all clients have its value.
        """
        both = [name for name in self.personal if name in names]
        if both:
            raise ConfigError(
                f"personal names '{both[0]}' ({len(both)} such), but train_only leaves"
                " it fixed, so it would be equal at all clients. Add it to train_only,"
                " or leave it out of personal."
            )

        def left(layers: Iterable[BatchNormLayer]) -> Iterator[BatchNormLayer]:
            for layer in layers:
                own = {k: n for k, n in layer.entries.items() if n not in names}
                if own:
                    yield BatchNormLayer(layer.path, own)

        layers, averaged = tuple(left(self.layers)), tuple(left(self.averaged))
        return replace(self, fixed=names, layers=layers, averaged=averaged)

    def _entries_at(self, pattern: str) -> list[str]:
        places = [pattern]
        if pattern == LAST_LAYER:
            head = head_of(self.names)
            places = [head] if head else []
        if pattern.startswith(_TYPE):
            places = [*self.types.get(pattern.removeprefix(_TYPE), ())]
        return [
            name for name in self.names if any(is_at(name, place) for place in places)
        ]

    @cached_property
    def part_of(self) -> Mapping[str, Part]:
        """The part of each entry."""
        part_of = dict.fromkeys(self.names, Part.REST)
        for layer in self.layers:
            for leaf, name in layer.entries.items():
                plain = leaf.removeprefix(_PARAMETRIZED).partition(".")[0]
                part_of[name] = _LEAF[plain]
        part_of |= dict.fromkeys(self.personal, Part.PERSONAL)
        part_of |= dict.fromkeys(self.fixed, Part.FIXED)
        return part_of

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
        """All other entries that are not PERSONAL."""
        return self.select([Part.REST])

    @property
    def perhaps_buffers(self) -> tuple[str, ...]:
        """The other entries that a split by names cannot tell from parameters."""
        if not self.by_names:
            return ()
        tracked = self.whole.select([Part.STATISTICS, Part.COUNTERS])
        rest = [name for name in self.select([Part.REST]) if name not in tracked]
        return tuple(name for name in rest if not _PARAMETER.search(name))

    @cached_property
    def weights(self) -> frozenset[str]:
        """The entries that an optimizer trains."""
        tracked = self.whole.select([Part.STATISTICS, Part.COUNTERS])
        return frozenset(self.names) - self.buffers - {*tracked, *self.perhaps_buffers}

    def moments(self) -> Iterator[tuple[str, str]]:
        """Yield the names (running_mean, running_var) of each layer that has both."""
        # Use ``whole``, because it includes averaged layers, which have variances as
        # well.
        for layer in self.whole.layers:
            if "running_mean" in layer.entries and "running_var" in layer.entries:
                yield layer.entries["running_mean"], layer.entries["running_var"]

    def instead_of_head(self) -> str:
        """Return a sentence with the last layer, for a model without a known head."""
        own = [name for name in self.names if name in self.parameters]
        path = own[-1].partition(f".{_PARAMETRIZED}")[0] if own else "PATH"
        path = path.removesuffix(".bias").removesuffix(".weight")
        return f"Name the layer that makes the outputs, such as '{path}', the last one."

    @property
    def other_norms(self) -> list[str]:
        """The paths of shared layers with running statistics that are not BatchNorm."""
        known = {layer.path for layer in self.whole.layers}
        return [
            path
            for path in _tracking(self.names)
            if path not in known
            and entry_name(path, "running_mean") not in {*self.personal, *self.fixed}
        ]

    def named_layers(self) -> str:
        """Return the number and the first paths of the layers, for messages."""
        paths = [layer.path or "(the model itself)" for layer in self.layers]
        shown = ", ".join(paths[:2]) + (", ..." if len(paths) > 2 else "")
        return (
            f"{len(paths)} BatchNorm {'layer' if len(paths) == 1 else 'layers'}"
            f" ({shown})"
        )

    def fingerprint(self, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Return a SHA-256 of names, parts and shapes.

        A client uses its saved state only if the fingerprint is equal.
        """
        # Use ``whole``, the split by types, because clients do not know ``layers``.
        part_of = self.whole.part_of
        lines = [f"{name} {part_of[name]} {tuple(shapes[name])}" for name in self.names]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def split_state(
    model_or_state_dict: nn.Module | Mapping[str, Any],
    layers: str | Sequence[str] = "",
    personal: str | Sequence[str] = "",
) -> Parts:
    """Return the split of a model's state into AFFINE, STATISTICS, COUNTERS and REST.

    In a model, layers are found by type: BatchNorm1d/2d/3d, SyncBatchNorm, lazy layers
    and every subclass. In a bare state dict (any mapping of names), a layer counts as
    BatchNorm if it has ``running_mean`` and ``num_batches_tracked``. Names do not distinguish an
    InstanceNorm with running statistics from a BatchNorm, or a BatchNorm without
    running statistics from another affine layer. If that matters, pass the model.

    The entries of a parametrization of gamma or beta (``torch.nn.utils.parametrize``)
    are AFFINE. Additional entries of a subclass are REST, because the papers treat
    gamma and beta: FedBN shares them, and FixBN never freezes them. ``personal`` with
    "type:CLASS" keeps all entries of a class with the clients.

    With ``layers``, a method treats only these BatchNorm layers, and the others are in
    REST. They are paths and globs, as a sequence or as a comma list ("layer1,layer2"). A
    path includes all layers below it.

    With ``personal``, these entries are PERSONAL, see ``Parts.with_personal``.

    Example::

        >>> from torch import nn
        >>> from fedbn_flwr import split_state
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        >>> parts = split_state(model, personal="2")
        >>> parts.affine, parts.statistics
        (('1.weight', '1.bias'), ('1.running_mean', '1.running_var'))
        >>> parts.personal, parts.rest
        (('2.weight', '2.bias'), ('0.weight', '0.bias'))

    Raises:
        ConfigError: a path or glob of ``layers`` matches no BatchNorm layer; a pattern
            of ``personal`` has no entry, or the head has another name; or a hook of the
            state dict renames entries.
    """
    # Find the paths of the layers: by type in a model, by names in a state dict.
    paths = []
    types: dict[str, list[str]] = {}
    tied: dict[str, str] = {}
    buffers: set[str] = set()
    parameters: set[str] = set()
    by_names = not isinstance(model_or_state_dict, nn.Module)
    if isinstance(model_or_state_dict, nn.Module):
        model_or_state_dict = named_by_state(model_or_state_dict)
        state = model_or_state_dict.state_dict(keep_vars=True)
        names = tuple(state)
        # An extra state may be any object.
        buffers = {n for n, e in state.items() if not getattr(e, "requires_grad", 0)}
        parameters = {n for n, e in state.items() if isinstance(e, nn.Parameter)}
        # Use remove_duplicate=False, because a layer registered at two paths is twice
        # in the state dict.
        modules = dict(model_or_state_dict.named_modules(remove_duplicate=False))
        paths = [*layers_of(model_or_state_dict, every_path=True)]
        for path, module in modules.items():
            for kind in type(module).__mro__ if path else ():
                types.setdefault(kind.__name__, []).append(without_wrappers(path))
        tied = tied_entries(model_or_state_dict)
    else:
        names = tuple(model_or_state_dict)
        parameters = {name for name in names if _PARAMETER.search(name)}
        # The statistics of a layer with other entries, such as running_std, would be
        # torn apart.
        split = [name.rpartition(".") for name in names]
        strange = {path for path, _, leaf in split if leaf not in _LEAF}
        paths = [path for path in _tracking(names) if path not in strange]

    # Find the parametrized leaves of each path. For the name
    # "bn.parametrizations.weight.original", the path is "bn".
    parametrized: dict[str, list[str]] = {}
    for name in names:
        path, mark, leaf = f".{name}".partition(f".{_PARAMETRIZED}")
        if mark and leaf.partition(".")[0] in _LEAF:
            leaves = parametrized.setdefault(path.removeprefix("."), [])
            leaves.append(_PARAMETRIZED + leaf)

    # Collect the entries of each layer: its own entries and its parametrized entries.
    known = frozenset(names)
    found = []
    for path in paths:
        entries = {}
        for leaf in (*_LEAF, *parametrized.get(path, ())):
            entries[leaf] = entry_name(path, leaf)
        present = {leaf: name for leaf, name in entries.items() if name in known}
        found.append(BatchNormLayer(path, present))
    parts = Parts(
        names,
        tuple(found),
        by_names,
        types=types,
        tied=tied,
        buffers=frozenset(buffers),
        parameters=frozenset(parameters),
    )
    if personal:
        parts = parts.with_personal(personal)
    return parts.only(layers)


def _tracking(names: Iterable[str]) -> list[str]:
    """Return the paths with a running mean and a counter."""
    known = frozenset(names)
    found = []
    for name in names:
        path, _, leaf = name.rpartition(".")
        # A fixed layer, such as FrozenBatchNorm2d, has no counter.
        if leaf == "running_mean" and entry_name(path, "num_batches_tracked") in known:
            found.append(path)
    return found


def refuse_other_layers(model: nn.Module, named: Collection[str]) -> None:
    """Refuse BatchNorm layers that the server has found by names, if the types differ.

    The paths may lack the prefix of a user's module around the network.

    Raises:
        ConfigError: a path belongs to another layer, or a BatchNorm layer is missing.
    """
    if not named:
        return
    found = sorted(map(without_wrappers, layers_of(model, every_path=True)))
    paths = sorted(map(without_wrappers, named))
    same = len(found) == len(paths) and all(
        f".{own}".endswith(f".{path}") for own, path in zip(found, paths, strict=True)
    )
    if not same:
        named_by_state(model)
        less = ",".join(path for path in paths if path not in found)
        more = ",".join(path for path in found if path not in paths)
        raise ConfigError(
            "the server has only the names of the layers. By type, these are no"
            f" BatchNorm: {less or 'none'}; and these are, though the server has not"
            f" found them: {more or 'none'}. If the initial arrays are of this model,"
            " give the strategy parts=split_state(model)"
            f"{less and f' and, to keep them with the clients, personal={less!r}'}."
            " Otherwise, this node has another model: build it like the server's"
        )


# --- paths and globs of layers and entries, as in layers= and personal= --------------
def is_at(path: str, pattern: str) -> bool:
    """Return whether a layer or entry has this path or glob, or is below it.

    The path also fits without a wrapper's prefix.
    """
    for one in (path, without_wrappers(path)):
        # A name may have brackets, which a glob reads as a set of characters.
        if f"{one}.".startswith(f"{pattern}."):
            return True
        if fnmatchcase(one, pattern) or fnmatchcase(one, f"{pattern}.*"):
            return True
    return False


def paths_in(patterns: str | Sequence[str]) -> list[str]:
    """Return the patterns, split at commas, without empty patterns."""
    each = patterns.split(",") if isinstance(patterns, str) else patterns
    return [pattern.strip() for pattern in each if pattern.strip()]


def near(pattern: str, paths: Sequence[str]) -> str:
    """Return a sentence with known paths that are similar to the pattern.

    If no path is similar, the sentence has the first paths. The paths of the modules
    above are also candidates.
    """
    known = dict.fromkeys(
        path.rsplit(".", count)[0] for path in paths for count in range(3)
    )
    known.pop(pattern, None)  # a known word or class without an entry
    similar = difflib.get_close_matches(pattern, list(known), n=3) or [*known][:3]
    return f"Near: {', '.join(repr(path) for path in similar) or 'none'}."


# --- entries that share a tensor -------------------------------------------------------
def tied_entries(model: nn.Module) -> dict[str, str]:
    """Map each entry that shares an earlier entry's tensor to the earlier entry."""
    # keep_vars=True returns the tensors of the model. Without it, each entry would be a
    # new tensor with an id of its own.
    first: dict[int, str] = {}
    tied = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        earlier = first.setdefault(id(tensor), name)
        if earlier != name:
            tied[name] = earlier
    return tied


def tied_apart(tied: Mapping[str, str], local: Collection[str]) -> Iterator[Problem]:
    """Yield a problem if a tied tensor stays with the client under only one name.

    Only the first such tensor is reported.

    Args:
        tied: see ``Parts.tied``.
        local: the entries that stay with the client.
    """
    for pair in tied.items():
        stays, shared = sorted(pair, key=lambda name: name not in local)
        if stays in local and shared not in local:
            yield Problem(
                "tied-apart",
                f"'{stays}' stays with the client, but '{shared}' is shared. Both are"
                " names of the same tensor, so one would overwrite the other. Untie"
                " them in the model, name both in personal, or use a strategy that"
                " shares both.",
                "personal",
                "model",
            )
            return
