"""Training of a part of a model, usually of a pretrained network.

One setting says what trains: the words of ``train_only``. It has three consequences.

1. A parameter that no word selects is frozen. A layer with running statistics, but
   without a selected entry, is a fixed function: it stays in eval mode and keeps the
   statistics, as with Keras' ``trainable = False`` and torchvision's
   ``FrozenBatchNorm2d``. A BatchNorm layer whose gamma or beta trains follows the
   method of the strategy.
2. The server applies the words to the split of its model, and clients freeze the
   entries that the server names, so that one place decides (``Parts.with_fixed``).
3. The fixed entries are a part of their own, ``Part.FIXED``. No method, average or
   noise sees them. They travel once: the server hashes their values, a client keeps
   them and confirms the hash (``client.fixed``), and later messages lack them in both
   directions. A node that has not confirmed the hash gets them in the same round
   (``server.rounds.dispatch``).

An entry that no rule covers is not fixed, such as a buffer outside BatchNorm. It
travels in each message. This costs bytes, but its value is the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any

import numpy as np
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.parts import (
    Parts,
    entry_name,
    is_at,
    near,
    paths_in,
    split_state,
)
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.training.freezing import force_eval, is_forced_eval
from fedbn_flwr.training.model_state import HEADS, head_of, without_wrappers
from fedbn_flwr.training.run_memory import first_time

__all__ = [
    "fixed_by",
    "freeze",
    "moved_though_frozen",
    "train_only",
    "trained_words",
    "warn_if_moved",
]

logger = logging.getLogger("flwr")

Arrays = Mapping[str, Any]

# The classes of torch's normalisation layers. Subclasses have them as base classes.
_NORMS = ("_BatchNorm", "_InstanceNorm", "GroupNorm", "LayerNorm", "RMSNorm")
_WORDS = ("norms", "head", "biases")
_BY_TYPE = "Pass parts=split_state(model) to the strategy."


def train_only(model: nn.Module, words: str | Sequence[str]) -> None:
    """Freeze all parameters that no word selects, in place.

    A BatchNorm layer without a selected entry stays in eval mode, even through
    ``model.train()``.

    Args:
        model: the model, with its final layers.
        words: a comma list or a sequence. If empty, all parameters train.

            - a path or glob: "layer4" selects all entries below it
            - "norms": gamma and beta of every normalisation layer of torch
            - "head": the module that the model calls fc, classifier or head
            - "biases": all biases, without the beta of normalisation layers
            - "type:BatchNorm2d": all entries below modules of this class

    Raises:
        ConfigError: a word selects no parameter; the message has similar names.

    Example::

        >>> from torchvision.models import resnet18
        >>> model = resnet18()
        >>> train_only(model, "norms,head")
        >>> sum(p.numel() for p in model.parameters() if p.requires_grad)
        522600
    """
    if paths_in(words):
        freeze(model, fixed_by(split_state(model), words))


def freeze(model: nn.Module, names: Collection[str]) -> ExitStack:
    """Freeze these entries: parameters, and layers whose entries are all named.

    Returns:
        The context whose end undoes this.

    Raises:
        ConfigError: a parameter has two names, and only one of them is given.
    """
    fixed = {without_wrappers(name) for name in names}
    undo = ExitStack()
    named = dict(model.named_parameters(remove_duplicate=False))
    trains = {named[name] for name in named if without_wrappers(name) not in fixed}
    frozen = {n: p for n, p in named.items() if without_wrappers(n) in fixed}
    for name, parameter in frozen.items():
        # A split by names does not reveal that two names have the same tensor.
        if parameter in trains:
            raise ConfigError(
                f"train_only: '{name}' is frozen, but the same tensor trains under"
                f" another name. {_BY_TYPE}"
            )
    for parameter in frozen.values():
        if parameter.requires_grad:
            parameter.requires_grad_(False)
            undo.callback(parameter.requires_grad_, True)
    for path, layer in model.named_modules():
        # A split by names takes an InstanceNorm with statistics for a BatchNorm.
        tracks = getattr(layer, "running_mean", None) is not None
        if not (tracks or isinstance(layer, _BatchNorm)) or is_forced_eval(layer):
            continue
        start = f"{without_wrappers(path)}." if path else ""
        own = [start + leaf for leaf in layer.state_dict(keep_vars=True)]
        if own and fixed.issuperset(own):
            undo.callback(force_eval(layer))
    return undo


def moved_though_frozen(
    parts: Parts, before: Arrays, after: Arrays
) -> tuple[list[str], str]:
    """Return the layers whose statistics have moved, but none of their parameters.

    The second value are the words of the parameters that have moved. Without any, no
    layer counts.
    """
    moved = {}
    for name in parts.names:
        if name in before and name in after:
            moved[name] = not np.array_equal(before[name], after[name])
    trained = {name: moved[name] for name in moved if name in parts.parameters}
    layers = []
    for layer in parts.whole.layers if any(trained.values()) else ():
        own = [name for name in layer.entries.values() if name in moved]
        at_rest = [not trained[name] for name in own if name in trained]
        means = [moved[name] for name in own if name.endswith("running_mean")]
        if at_rest and all(at_rest) and any(means):
            layers.append(layer.path)
    return layers, trained_words(trained) if layers else ""


def warn_if_moved(
    fixed: str | None, states: Callable[[], tuple[Parts, Arrays, Arrays]]
) -> None:
    """Warn once of layers whose statistics have moved, but none of their parameters.

    There are many ways to freeze a layer, such as an optimizer that lacks it. So the
    values decide.

    Args:
        fixed: the hash of the fixed entries. Each part that trains is looked at once.
        states: returns the arguments of ``moved_though_frozen``.
    """
    if not first_time("moved", fixed):
        return
    layers, words = moved_though_frozen(*states())
    if layers:
        logger.warning(
            "training changes the running statistics of %d BatchNorm layer(s), but no"
            " parameter of them (%s, ...), and so a frozen part of the model. To keep"
            " it as it is, pass train_only='%s' and parts=split_state(model) to FedAvg,"
            " or to a method for BatchNorm if another layer trains (train-only in a"
            " config); a loop of your own then trains inside `with bn_rules(...)`. To"
            " train the layers, give them to the optimizer. To adapt the statistics on"
            " purpose, ignore this warning.",
            len(layers),
            layers[0],
            words,
        )


def trained_words(trains: Mapping[str, bool]) -> str:
    """Return the shortest words that select exactly the parameters that train."""
    words = []
    for name in trains:
        for path in accumulate(name.split("."), "{}.{}".format):
            if all(trains[other] for other in trains if is_at(other, path)):
                words.append(path)
                break
    return ",".join(dict.fromkeys(words))


def fixed_by(
    parts: Parts, words: str | Sequence[str], arrays: Arrays | None = None
) -> frozenset[str]:
    """Return the entries that do not change if only the entries of the words train.

    Args:
        parts: the split of the state.
        words: see ``train_only``.
        arrays: the entries, with shapes and dtypes, for a split by names.

    Raises:
        ConfigError: a word selects no parameter, or needs the types of the layers; or
            an entry that no word selects may be a parameter.
    """
    arrays = arrays or {}
    perhaps = parts.whole.perhaps_buffers
    chosen: set[str] = set()
    problems = []
    for word in paths_in(words):
        found = _selected(parts, word, arrays)
        chosen |= found
        if not found & parts.parameters.union(perhaps):
            paths = [one for one in parts.names if one in parts.parameters]
            known = [*_WORDS, *paths, *(f"type:{kind}" for kind in parts.types)]
            hint = "It has none." if word in _WORDS else near(word, known)
            text = f"train_only: {word!r} names no parameter of the model."
            problems.append(f"{text} {hint}")
    if problems:
        raise ConfigError("\n".join(problems))
    for name in perhaps:
        # No optimizer trains integers, and a layer without a counter has statistics.
        statistics = name.endswith(("running_mean", "running_var"))
        may_train = not statistics and np.dtype(arrays[name].dtype).kind in "fc"
        if may_train and name not in chosen:
            raise ConfigError(
                f"train_only: entry '{name}' may be a parameter or a buffer, and only a"
                f" parameter is frozen. {_BY_TYPE}"
            )
    # A tensor with several names trains if one of the names is selected.
    trained = {parts.tied.get(name, name) for name in chosen}

    def trains(name: str) -> bool:
        return parts.tied.get(name, name) in trained

    fixed = {name for name in parts.parameters if not trains(name)}
    # Layers with running statistics of any kind, such as BatchNorm and InstanceNorm.
    for name in parts.names:
        path, _, leaf = name.rpartition(".")
        if leaf == "running_mean":
            start = entry_name(path, "")
            own = [other for other in parts.names if other.startswith(start)]
            fixed.update(() if any(map(trains, own)) else own)
    return frozenset(fixed)


def _selected(parts: Parts, word: str, arrays: Arrays) -> set[str]:
    """Return the entries that a word selects."""
    if word == "norms":
        return _at(parts, _norm_paths(parts, word, arrays)) & parts.parameters
    if word == "biases":
        named = {one for one in parts.parameters if "bias" in one.rpartition(".")[2]}
        return named - _at(parts, _norm_paths(parts, word, arrays))
    if word.startswith("type:"):
        if parts.by_names:
            raise ConfigError(f"train_only: {word!r} needs types. {_BY_TYPE}")
        return _at(parts, parts.types.get(word.removeprefix("type:"), ()))
    head = head_of(parts.names) if word == "head" else ""
    found = _at(parts, [head or word])
    if word == "head" and not found:
        raise ConfigError(
            "train_only: 'head' needs exactly one module named"
            f" {', '.join(HEADS)} at the top of the model. {parts.instead_of_head()}"
        )
    return found


def _norm_paths(parts: Parts, word: str, arrays: Arrays) -> Collection[str]:
    """Return the paths of the normalisation layers.

    Raises:
        ConfigError: the split is by names, and a layer of another kind may be one.
    """
    paths = {without_wrappers(layer.path) for layer in parts.whole.layers}
    for kind in _NORMS:
        paths.update(parts.types.get(kind, ()))
    for name in parts.parameters if parts.by_names else ():
        # Gamma has the shape of beta. Weights of other layers have more dimensions.
        path, _, leaf = name.rpartition(".")
        gamma, beta = arrays[name], arrays.get(f"{path}.bias" if path else "bias")
        like_gamma = len(gamma.shape) == 1 or (
            beta is not None and gamma.shape == beta.shape
        )
        if leaf == "weight" and like_gamma and without_wrappers(path) not in paths:
            raise ConfigError(
                f"train_only: {word!r} needs the types of the layers, because"
                f" '{name}' may belong to a GroupNorm or LayerNorm. {_BY_TYPE}"
            )
    return paths


def _at(parts: Parts, places: Collection[str]) -> set[str]:
    return {name for name in parts.names if any(is_at(name, one) for one in places)}
