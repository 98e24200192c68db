"""Train and eval modes of layers.

BatchNorm layers that were built in eval mode stay in eval mode, even though
``model.train()`` would change their mode. As in torch, ``requires_grad`` does not
affect the statistics.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.training.layer_calls import plain_values, replace_attribute

__all__ = [
    "copy_modes",
    "force_eval",
    "force_eval_as_built",
    "in_mode",
    "is_forced_eval",
    "layers_of",
    "left_in_eval",
    "moving_though_frozen",
    "stays_in_eval",
    "unlike_in_tests",
]


def layers_of(model: nn.Module, *, every_path: bool = False) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers by path, found by type.

    A shared layer is listed under its first path. With ``every_path``, it is listed
    under all its paths, as in the state.

    Raises:
        NormLayerError: a module is in TorchScript, so the types of its layers and their
            forward passes are hidden.
    """
    layers = {}
    for path, module in model.named_modules(remove_duplicate=not every_path):
        if isinstance(module, torch.jit.ScriptModule):
            raise NormLayerError(
                f"module {path or 'model'!r} is in TorchScript, so its BatchNorm"
                " layers are hidden. Use the plain module."
            )
        if isinstance(module, _BatchNorm):
            layers[path] = module
    return layers


def force_eval(layer: nn.Module) -> Callable[[], None]:
    """Keep a layer in eval mode, even through ``model.train()``.

    Modules inside the layer, such as dropout, keep the mode that the model gives them.

    Returns:
        The function that undoes this.
    """
    undo = ExitStack()
    undo.callback(replace_attribute(layer, "training", False))
    stay = functools.partial(_stay, layer)
    undo.callback(replace_attribute(layer, "train", stay))
    return undo.close


def is_forced_eval(layer: nn.Module) -> bool:
    """Return whether a layer is kept in eval mode by ``force_eval``."""
    replaced = vars(layer).get("train")
    return isinstance(replaced, functools.partial) and replaced.func is _stay


def left_in_eval(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers in eval mode of a model in train mode, by path.

    A shared layer is listed under each of its paths. The result is empty for a model in
    eval mode: loaders of pretrained weights return such models, and their modes do not
    reveal the user's intention.
    """
    if not model.training:
        return {}
    return {
        path: layer
        for path, layer in layers_of(model, every_path=True).items()
        if not layer.training
    }


def force_eval_as_built(model: nn.Module) -> str:
    """Keep the layers of ``left_in_eval`` in eval mode, even in ``model.train()``.

    Returns:
        A sentence for the user that names the layers that were not yet kept; "" if
        there are none.
    """
    # A layer that is used twice has two paths; name it by the first.
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
        f"{len(paths)} BatchNorm layer(s) of the model are built in eval mode"
        f" ({_listed(paths)}). They stay in eval mode, and their running statistics do"
        " not change. To train them, call model.train() in the function that builds the"
        " model. To freeze only parameters, use train-only or requires_grad_(False)."
    )


def unlike_in_tests(model: nn.Module) -> str:
    """Return a warning about layers whose tests use statistics that never change.

    These layers train with the statistics of the batch. Their ``track_running_stats``
    was set to False after they were made with running statistics. Returns "" if there
    are none.
    """
    # in eval mode, torch's forward pass uses running statistics if they exist
    unlike = {
        path: layer
        for path, layer in layers_of(model).items()
        if layer.running_mean is not None and not layer.track_running_stats
    }
    paths = _outside_eval(model, unlike)
    if not paths:
        return ""
    return (
        f"{len(paths)} BatchNorm layer(s) train with the statistics of the batch, but"
        " are tested with running statistics that training does not change"
        f" ({_listed(paths)}). The reason is that track_running_stats was set to False"
        " after they were made. Leave it True, or make the layers with"
        " track_running_stats=False."
    )


def moving_though_frozen(model: nn.Module) -> list[str]:
    """Return the paths of the frozen BatchNorm layers whose statistics move.

    ``requires_grad_(False)`` freezes gamma and beta, but train mode still updates the
    running statistics. A shared layer is listed under all its paths.
    """
    frozen = {}
    for path, layer in layers_of(model, every_path=True).items():
        trains = {entry.requires_grad for entry in layer.parameters()}
        if trains == {False} and layer.track_running_stats and layer.momentum != 0:
            frozen[path] = layer
    return _outside_eval(model, frozen)


def _outside_eval(model: nn.Module, layers: Mapping[str, _BatchNorm]) -> list[str]:
    """Return the paths of the layers that training does not leave in eval mode."""
    # Few models have such a layer, and each message may build a model.
    in_eval = stays_in_eval(model) if layers else frozenset()
    return [path for path, layer in layers.items() if layer not in in_eval]


def _listed(paths: Sequence[str]) -> str:
    named = [path or "the model itself" for path in paths[:3]]
    if len(paths) > 3:
        named.append("...")
    return ", ".join(named)


def stays_in_eval(model: nn.Module) -> frozenset[_BatchNorm]:
    """Return the BatchNorm layers that training leaves in eval mode.

    These are the layers of ``left_in_eval`` and of ``force_eval``, and the layers that
    the model's own ``train`` leaves in eval mode.
    """
    layers = set(left_in_eval(model).values())
    with in_mode(model, True):
        layers.update(one for one in layers_of(model).values() if not one.training)
    return frozenset(layers)


def _stay(layer: nn.Module, mode: bool = True) -> nn.Module:
    values = plain_values(layer)
    if "training" in values:  # what the mode would be without ``force_eval``
        values["training"] = mode
    for module in layer.children():
        module.train(mode)
    return layer


def copy_modes(model: nn.Module, other: nn.Module) -> None:
    """Give another model the modes and the replaced methods of this model.

    A method is copied if it is a ``functools.partial`` with its module as first
    argument (``layer_calls.replace_attribute``).
    """
    for own, its in zip(model.modules(), other.modules(), strict=True):
        for name, method in vars(own).items():
            is_partial = isinstance(method, functools.partial) and method.args
            # Compare by identity, because == compares an array element by element.
            if is_partial and method.args[0] is own and name not in vars(its):
                again = functools.partial(method.func, its, *method.args[1:])
                setattr(its, name, again)
        its.training = own.training


@contextmanager
def in_mode(model: nn.Module, mode: bool) -> Iterator[None]:
    """Put the model into a mode, and restore every module's mode at the end."""
    modes = [(module, module.training) for module in model.modules()]
    trains = model.training
    try:
        model.train(mode)
        yield
    finally:
        # First let layers act that change their weights with the mode (LoRA). Then
        # restore the modes one by one, because they may differ.
        model.train(trains)
        for module, mode in modes:
            module.training = mode
