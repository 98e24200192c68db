"""Train some layers only: the other parameters stay as they are, as one does with a pretrained network. Torch only.

A BatchNorm layer outside the named ones has two more questions: by which statistics it normalises, and whether its
running ones move. ``eval`` (the default): the running ones, which stay as they are, so that the frozen part of the
network remains one fixed function. It is what Keras does with ``trainable = False`` and torchvision's detectors with
``FrozenBatchNorm2d``. ``train``: the batch's, and the running ones move, so a client's part adapts to its inputs with
fixed weights (AdaBN, Li et al. 2016, arXiv:1603.04779; fastai and Lightning train BatchNorm in frozen parts).
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Sequence
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.training.replaced_method import replace_method

__all__ = ["FrozenBN", "hold_eval", "holds_eval", "train_only"]

FrozenBN = Literal["eval", "train"]


def train_only(model: nn.Module, names: Sequence[str], frozen_bn: FrozenBN = "eval") -> None:
    """Freeze all parameters except those under ``names``, in place.

    Args:
        model: the model, with its final layers.
        names: paths of modules or names of parameters; a prefix ends at a dot. Empty = all parameters train.
        frozen_bn: mode of the BatchNorm layers of which no entry is named; "eval" is kept through ``model.train()``.

    Raises:
        ConfigError: a name has no parameter; the message gives the nearest one.
    """
    if not names:
        return
    known = [name for name, _ in model.named_parameters(remove_duplicate=False)]

    def has_parameter(name: str) -> bool:
        return any(_under(entry, [name]) for entry in known)

    if unknown := [name for name in names if not has_parameter(name)]:
        paths = dict.fromkeys(part for entry in known for part in _prefixes(entry))
        raise ConfigError("\n".join(_no_parameter(name, list(paths)) for name in unknown))
    wanted = {p for name, p in model.named_parameters(remove_duplicate=False) if _under(name, names)}
    for parameter in model.parameters():
        if parameter not in wanted:
            parameter.requires_grad_(False)
    for path, layer in model.named_modules():
        trains = _under(path, names) or any(p in wanted for p in layer.parameters(recurse=False))
        if isinstance(layer, _BatchNorm) and not trains and frozen_bn == "eval":
            hold_eval(layer)


def hold_eval(layer: nn.Module) -> Callable[[], None]:
    """Keep a layer in eval mode, also through ``model.train()``; return the function that undoes this."""
    mode = layer.training
    layer.eval()
    release = replace_method(layer, "train", functools.partial(_stay, layer))

    def undo() -> None:
        release()
        type(layer).train(layer, mode)  # also under an earlier hold

    return undo


def holds_eval(layer: nn.Module) -> bool:
    """Return whether a layer is kept in eval mode by ``hold_eval``."""
    held = vars(layer).get("train")
    return isinstance(held, functools.partial) and held.func is _stay


def _stay(layer: nn.Module, mode: bool = True) -> nn.Module:
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
    return f"train-only: {name!r} names no parameter of the model.{hint} Its parts with parameters: {', '.join(top)}."
