"""Train and eval modes of a model's layers, and training of some layers only: the other
parameters stay as they are, as one does with a pretrained network. Torch only.

A BatchNorm layer outside the named ones has two more questions: by which statistics it
normalises, and whether its running ones move. ``eval`` (the default): the running ones,
which stay as they are, so that the frozen part of the network remains one fixed
function. It is what Keras does with ``trainable = False`` and torchvision's detectors
with ``FrozenBatchNorm2d``. ``train``: the batch's, and the running ones move, so a
client's part adapts to its inputs with fixed weights (AdaBN, Li et al. 2016,
arXiv:1603.04779; fastai and Lightning train BatchNorm in frozen parts).

A model may come with BatchNorm in eval mode, which ``model.train()`` would undo: its
author froze it, and it stays so. Parameters without ``requires_grad`` say nothing about
the statistics, as in torch. Of BatchNorm in TorchScript the mode is all that can be
changed.
"""

from __future__ import annotations

import copy
import difflib
import functools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.training.model_state import ATTRIBUTES_OF_TORCH, memo_of
from fedbn_flwr.training.replaced_method import replace_method

__all__ = [
    "FrozenBN",
    "force_eval",
    "force_eval_as_built",
    "is_forced_eval",
    "is_scripted_batchnorm",
    "layers_of",
    "left_in_eval",
    "refuse_scripted",
    "restored_modes",
    "stays_in_eval",
    "train_only",
    "unchanged",
    "unlike_in_tests",
]

# The attributes of every module, which hold its entries, hooks and mode.
_CHANGED_IN_PLACE = (
    list,
    tuple,
    dict,
    set,
    deque,
    np.ndarray,
    np.random.Generator,
    random.Random,
    torch.Generator,
)
_SCRIPTED = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")


def layers_of(model: nn.Module, *, every_path: bool = False) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers by path, found by type.

    A shared layer is there once, or at every path, as in the state.
    """
    modules = model.named_modules(remove_duplicate=not every_path)
    return {path: module for path, module in modules if isinstance(module, _BatchNorm)}


@contextmanager
def restored_modes(model: nn.Module) -> Iterator[None]:
    """Restore every module's train or eval mode at the end of the block."""
    # each module by itself: ``train(mode)`` of the model would give all the same
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore at the end of the block all that a forward pass may change in a model.

    They are modes, parameters, buffers, and tensors, plain values, containers, arrays,
    generators and dataclasses among the attributes of its modules: running statistics
    of any layer, counters, codebooks, averages, states of a recurrence. Each is the
    same object as before, with its values.
    """
    tensors: list[Any] = []
    others: list[Any] = []
    # Containers may hold what is restored by itself.
    own = (*model.modules(), *model.parameters(), *model.buffers())
    memo = memo_of(model, own)
    for module in model.modules():
        tables: list[Any] = [module._parameters, module._buffers, vars(module)]
        for table in tables:
            for name, value in table.items():
                if isinstance(value, Tensor) and not is_lazy(value):
                    tensors.append((table, name, value, value.detach().clone()))
                elif name not in ATTRIBUTES_OF_TORCH:
                    others.append((table, name, value))
                    # The pass has a copy: what it appends is in no one else's list.
                    if isinstance(value, _CHANGED_IN_PLACE) or is_dataclass(value):
                        with suppress(Exception):
                            table[name] = copy.deepcopy(value, memo)
    try:
        with restored_modes(model):
            yield
    finally:
        for table, name, value in others:
            table[name] = value
        with torch.no_grad():
            for table, name, tensor, before in tensors:
                table[name] = tensor
                # As observers of quantisation do in their first pass.
                if tensor.shape != before.shape:
                    tensor.data = before
                # A write counts as a change in torch: only where there is something.
                elif not torch.equal(tensor, before):
                    tensor.copy_(before)


def is_scripted_batchnorm(module: nn.Module) -> bool:
    """Return whether a layer is BatchNorm in TorchScript.

    Its state has the layer's entries, and its forward pass is out of reach.
    """
    # TorchScript keeps the name of the class only.
    return (
        isinstance(module, torch.jit.ScriptModule)
        and getattr(module, "original_name", "") in _SCRIPTED
    )


def refuse_scripted(model: nn.Module, what: str) -> None:
    """Refuse a model with BatchNorm in TorchScript, on which ``what`` has no effect.

    Layers that the model keeps in eval mode, those of a frozen backbone, are left as
    they are.

    Raises:
        NormLayerError: there is such a layer; the message names the first.
    """
    scripted = {
        path: module
        for path, module in model.named_modules()
        if is_scripted_batchnorm(module)
    }
    if not scripted:
        return
    # A model may have a ``train`` of its own that leaves layers in eval mode: ask it.
    with restored_modes(model):
        model.train()
        refused = [path for path, module in scripted.items() if module.training]
    if refused:
        kind = type(scripted[refused[0]]).__name__
        raise NormLayerError(
            f"{what}: BatchNorm layer {refused[0] or 'model'!r} is a {kind}, in which"
            " it would have no effect. Use the plain module."
        )


FrozenBN = Literal["eval", "train"]


def train_only(
    model: nn.Module, names: Sequence[str], frozen_bn: FrozenBN = "eval"
) -> None:
    """Freeze all parameters except those under ``names``, in place.

    Args:
        model: the model, with its final layers.
        names: paths of modules or names of parameters; a prefix ends at a dot. Empty =
            all parameters train.
        frozen_bn: mode of the BatchNorm layers of which no entry is named; "eval" is
            kept through ``model.train()``.

    Raises:
        ConfigError: a name has no parameter; the message gives the nearest one.
    """
    if not names:
        return
    # Weights that layers share have several names, and each may be the named one.
    parameters = list(model.named_parameters(remove_duplicate=False))
    # A name without a parameter would silently freeze all.
    known = [entry for entry, _ in parameters]
    unknown = [
        name for name in names if not any(_under(entry, [name]) for entry in known)
    ]
    if unknown:
        paths = dict.fromkeys(part for entry in known for part in _prefixes(entry))
        raise ConfigError(
            "\n".join(_no_parameter(name, list(paths)) for name in unknown)
        )
    wanted = {p for entry, p in parameters if _under(entry, names)}
    for parameter in model.parameters():
        if parameter not in wanted:
            parameter.requires_grad_(False)
    if frozen_bn != "eval":
        return
    for path, layer in layers_of(model).items():
        named = any(p in wanted for p in layer.parameters(recurse=False))
        if not named and not _under(path, names):
            force_eval(layer)


def force_eval(layer: nn.Module) -> Callable[[], None]:
    """Keep a layer in eval mode, also through ``model.train()``; return the function
    that undoes this.

    The modules inside a layer, a dropout say, keep the mode that the model gives them.
    """
    mode = layer.training
    layer.training = False
    release = replace_method(layer, "train", functools.partial(_stay, layer))

    def undo() -> None:
        release()
        layer.training = mode

    return undo


def is_forced_eval(layer: nn.Module) -> bool:
    """Return whether a layer is kept in eval mode by ``force_eval``."""
    replaced = vars(layer).get("train")
    return isinstance(replaced, functools.partial) and replaced.func is _stay


def left_in_eval(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers that a model in train mode has in eval mode, by path;
    a shared one has each path.

    A model that is in eval mode as a whole, as loaders of pretrained weights return it,
    says nothing of its layers.
    """
    if not model.training:
        return {}
    return {
        path: layer
        for path, layer in layers_of(model, every_path=True).items()
        if not layer.training
    }


def force_eval_as_built(model: nn.Module) -> str:
    """Keep the layers of ``left_in_eval`` as they are, through ``model.train()``;
    return what to tell the user.

    Returns:
        A sentence that names the layers; "" if there are none but those that are kept
        already.
    """
    # A layer that is used twice has two paths, and is told by its first.
    left: dict[_BatchNorm, str] = {}
    for path, layer in left_in_eval(model).items():
        if not is_forced_eval(layer):
            left.setdefault(layer, path)
    for layer in left:
        force_eval(layer)
    if not left:
        return ""
    paths = list(left.values())
    return (
        f"{len(paths)} BatchNorm layer(s) are in eval mode in the model as it is built"
        f" ({_listed(paths)}): they stay so, and their running statistics do not"
        " change. If they shall train, call model.train() where the model is built; to"
        " freeze parameters alone, use train-only or requires_grad_(False)."
    )


def unlike_in_tests(model: nn.Module) -> str:
    """Return what to tell the user of layers that train by the batch and are tested by
    statistics that never move.

    Their ``track_running_stats`` was set to False after they were made with running
    statistics. "" if there are none.
    """
    # torch's forward pass in eval mode uses statistics wherever they are
    unlike = {
        layer: path
        for path, layer in layers_of(model).items()
        if layer.running_mean is not None and not layer.track_running_stats
    }
    # first, as few models have one, and a model may be built for every message
    if not unlike:
        return ""
    in_eval = stays_in_eval(model)
    paths = [path for layer, path in unlike.items() if layer not in in_eval]
    if not paths:
        return ""
    return (
        f"{len(paths)} BatchNorm layer(s) train with the batch's statistics and are"
        f" tested with running ones that training does not move ({_listed(paths)}):"
        " track_running_stats was set to False after they were made. Leave it True, or"
        " make them with track_running_stats=False."
    )


def _listed(paths: Sequence[str]) -> str:
    named = [path or "the model itself" for path in paths[:3]]
    if len(paths) > 3:
        named.append("...")
    return ", ".join(named)


def stays_in_eval(model: nn.Module) -> frozenset[_BatchNorm]:
    """Return the BatchNorm layers that training leaves in eval mode.

    They are those of ``left_in_eval``, those of ``force_eval`` and those that a
    ``train`` of the model's own leaves so.
    """
    layers = set(left_in_eval(model).values())
    with restored_modes(model):
        model.train()
        for module in layers_of(model).values():
            if not module.training:
                layers.add(module)
    return frozenset(layers)


def _stay(layer: nn.Module, mode: bool = True) -> nn.Module:
    for module in layer.children():
        module.train(mode)
    return layer


def _under(entry: str, names: Sequence[str]) -> bool:
    return any(entry == name or entry.startswith(f"{name}.") for name in names)


def _prefixes(entry: str) -> list[str]:
    parts = entry.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _no_parameter(name: str, paths: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, paths, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    top = [path for path in paths if "." not in path]
    return (
        f"train-only: {name!r} names no parameter of the model.{hint} Its parts with"
        f" parameters: {', '.join(top)}."
    )
