"""The entries of a model that local training does not change."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from fedbn_flwr.batchnorm.parts import (
    BatchNormLayer,
    Part,
    Parts,
    entry_name,
    split_state,
)
from fedbn_flwr.training.freezing import stays_in_eval

__all__ = ["fixed_entries", "learning_parts"]


def fixed_entries(model: nn.Module) -> frozenset[str]:
    """Return the entries that local training does not change (see ``train_only``).

    These are parameters without ``requires_grad``, the statistics and counters of
    layers that are kept in eval mode, and floating buffers, such as a constant window
    or a mask. Buffers that training changes are excluded: the buffers of layers with
    running statistics and of spectral norm. A buffer with its own update rule is
    wrongly included; remove it from the result.
    """
    fixed = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            fixed.add(name)
    parts, in_eval = split_state(model), stays_in_eval(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        buffers = dict(module.named_buffers(recurse=False))
        if _moves_buffers(module, buffers):
            continue
        for leaf, buffer in buffers.items():
            name = entry_name(path, leaf)
            floating = buffer.is_floating_point() or buffer.is_complex()
            # A buffer that is not persistent is not an entry of the state.
            if floating and name in parts.part_of:
                fixed.add(name)
    for layer in parts.layers:
        if modules[layer.path] in in_eval:
            for name in layer.entries.values():
                # Gamma and beta are parameters; training may change them in eval mode.
                if parts.part_of[name] != Part.AFFINE:
                    fixed.add(name)
    return frozenset(fixed)


def _moves_buffers(module: nn.Module, buffers: Collection[str]) -> bool:
    """Return whether training changes a module's buffers.

    These buffers are running statistics, or the vectors of spectral norm. The vectors
    are in a parametrization or, in torch's older form, in a hook of the module.
    """
    if isinstance(module, _SpectralNorm):
        return True
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            return True
    return any(leaf.startswith("running_") for leaf in buffers)


def learning_parts(
    model: nn.Module,
    layers: str | Sequence[str] = "",
    personal: str | Sequence[str] = "",
) -> Parts:
    """Return ``split_state`` with the fixed entries of BatchNorm layers in REST.

    Local training does not change the ``fixed_entries``. All arguments are explained in
    ``split_state``.
    """
    parts = split_state(model, layers, personal)
    fixed = fixed_entries(model)
    return replace(
        parts,
        layers=tuple(_learning(parts.layers, fixed)),
        averaged=tuple(_learning(parts.averaged, fixed)),
    )


def _learning(
    layers: Iterable[BatchNormLayer], fixed: Collection[str]
) -> Iterator[BatchNormLayer]:
    for layer in layers:
        learning = {
            leaf: name for leaf, name in layer.entries.items() if name not in fixed
        }
        if learning:
            yield BatchNormLayer(layer.path, learning)
