"""The sum of the examples' gradients, each clipped, to which a step of DP-SGD adds noise; and what has no such sum.

A model whose output for an example depends on the others of its batch is refused. Torch only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.training.losses import LossFn
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.scripted import is_scripted_batchnorm
from fedbn_flwr.training.wrappers import unwrap

__all__ = ["WAY_OUT", "ClippedSum", "check_layers", "clipped_sum", "mixes_examples", "try_two_examples"]

_AT_ONCE = 2**26  # numbers in the gradients of the examples that are in memory at the same time


class ClippedSum(NamedTuple):
    """The sum of clipped gradients over a batch of B examples.

    Attributes:
        total: the sum by parameter, at least in float32.
        losses: (B,).
        outputs: (B, ...).
        not_finite: how many gradients were not finite and added nothing.
    """

    total: dict[str, Tensor]
    losses: Tensor
    outputs: Tensor
    not_finite: int


def clipped_sum(
    model: nn.Module, loss: LossFn, inputs: Tensor, targets: Tensor, clipping_norm: float, amp: bool = False
) -> ClippedSum:
    """Return the sum of the examples' gradients, each with a norm of at most C.

    Args:
        model: the model; its parameters with ``requires_grad`` are trained.
        loss: mean loss of a batch of (outputs, targets).
        inputs: (B, ...); B may be 0.
        targets: (B, ...).
        clipping_norm: C.
        amp: bfloat16 autocast in the forward pass.

    Raises:
        ConfigError: the gradient of one example cannot be computed; the loss has class weights.
    """
    if targets.dim() == 1 and _weighs_classes(loss):
        raise ConfigError(
            "record-level privacy: the class weights of the loss have no effect, since its mean over one example "
            "divides by the weight of that example. Leave them out"
        )
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    of_each = _gradient_of_each(model, loss, amp)
    total = {name: torch.zeros_like(value, dtype=_wide(value)) for name, value in trained.items()}
    losses, outputs, not_finite = [inputs.new_zeros(0, dtype=torch.float32)], list[Tensor](), 0
    size = max(1, _AT_ONCE // sum(value.numel() for value in trained.values()))
    for first in range(0, len(inputs), size):
        some = slice(first, first + size)
        gradients, (values, answers) = of_each(trained, inputs[some], targets[some])
        clipped, left_out = _sum_of_clipped(gradients, clipping_norm)
        not_finite += left_out
        for name, gradient in clipped.items():
            total[name] += gradient
        losses.append(values.detach())
        outputs.append(answers.detach())
    return ClippedSum(total, torch.cat(losses), torch.cat(outputs) if outputs else inputs.new_zeros(0), not_finite)


def _gradient_of_each(
    model: nn.Module, loss: LossFn, amp: bool
) -> Callable[[Mapping[str, Tensor], Tensor, Tensor], Any]:
    """Return a function of (trained parameters, inputs, targets): by example the gradients, and (losses, outputs)."""
    buffers = dict(model.named_buffers())

    def of_one(values: Mapping[str, Tensor], example: Tensor, target: Tensor) -> Any:
        with torch.autocast(example.device.type, torch.bfloat16) if amp else nullcontext():
            outputs = _call_with(model, {**buffers, **values}, example[None])
            value = loss(outputs, target[None])
        return value, (value, outputs[0])

    of_each = vmap(grad(of_one, has_aux=True), in_dims=(None, 0, 0), randomness="different")

    def checked(trained: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> Any:
        try:
            return of_each(trained, inputs, targets)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(
                f"record-level privacy needs the gradient of each example, and torch cannot compute it: {error}. The "
                "model must treat the examples one by one, and change no buffer by their values."
            ) from error

    return checked


def _sum_of_clipped(gradients: Mapping[str, Tensor], clipping_norm: float) -> tuple[dict[str, Tensor], int]:
    """Return the sum over the examples (the first dimension) and how many are not finite: these add nothing."""
    rows = {name: gradient.reshape(len(gradient), -1) for name, gradient in gradients.items()}
    lengths = [torch.linalg.vector_norm(row, dim=1, dtype=torch.float64) for row in rows.values()]
    length = torch.linalg.vector_norm(torch.stack(lengths), dim=0)
    finite = length.isfinite()
    factor = torch.where(finite, clipping_norm / length.clamp(min=clipping_norm), 0.0)[:, None]
    not_finite = int((~finite).sum())
    if not_finite:
        rows = {name: torch.where(finite[:, None], row, 0.0) for name, row in rows.items()}
    # Not a product of matrices, which may round to TF32.
    sums = {name: (factor.to(_wide(row)) * row).sum(0) for name, row in rows.items()}
    return {name: value.view(gradients[name].shape[1:]) for name, value in sums.items()}, not_finite


def _weighs_classes(loss: LossFn) -> bool:
    """Return whether the loss is torch's mean over classes with weights, which it divides by their sum."""
    if isinstance(loss, functools.partial):
        known, settings = loss.func in (functional.cross_entropy, functional.nll_loss), loss.keywords
        return known and settings.get("weight") is not None and settings.get("reduction", "mean") == "mean"
    return isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.weight is not None and loss.reduction == "mean"


def _wide(value: Tensor) -> torch.dtype:
    """Return the type in which gradients are clipped and summed: rounding must not make one longer than C."""
    return torch.promote_types(value.dtype, torch.float32)


WAY_OUT = (
    "Use another norm (norm=group, layer or wsconv); or keep BatchNorm frozen from the first round, at statistics that "
    "no client's data have touched (strategy=fixbn with freeze-at=0, and init= for public weights), or in the part "
    "that train-only freezes"
)


def mixes_examples(model: nn.Module) -> list[str]:
    """Return the layers whose output for an example depends on others, in their present mode, one line each."""
    lines = []
    for path, layer in model.named_modules():
        kind, statistics = type(layer).__name__, getattr(layer, "running_mean", None)
        if (isinstance(layer, _BatchNorm) or is_scripted_batchnorm(layer)) and (layer.training or statistics is None):
            lines.append(f"{path} ({kind}) normalises an example with the others of its batch")
        if isinstance(layer, _InstanceNorm) and layer.training and statistics is not None:
            lines.append(f"{path} ({kind}) has running statistics, which keep what no noise protects")
    return [f"record-level privacy: {what}" for what in lines]


def check_layers(model: nn.Module) -> None:
    """Raise ConfigError for a wrapper or a complex parameter, NormLayerError for a layer that mixes examples."""
    if unwrap(model) is not model:
        raise ConfigError(
            f"record-level privacy computes the gradients of the module itself: {type(model).__name__} around it "
            "would have no effect. Pass the module inside."
        )
    if refused := [name for name, p in model.named_parameters() if p.requires_grad and p.is_complex()]:
        raise ConfigError(
            f"record-level privacy adds real noise, and parameter '{refused[0]}' is complex. Freeze it (train-only), "
            "or store its real and imaginary parts (torch.view_as_real)."
        )
    if mixing := mixes_examples(model):
        raise NormLayerError("\n".join(mixing) + f"\n{WAY_OUT}.")


def try_two_examples(model: nn.Module, two: Tensor) -> None:
    """Raise NormLayerError if the output for the first of two examples depends on the second, given the same masks."""
    outputs = []
    for pair in (two, two[[0, 0]]):
        buffers = {name: value.clone() for name, value in model.named_buffers()}
        with torch.no_grad(), seeded(0):
            outputs.append(_call_with(model, buffers, pair)[0].double())
    if (outputs[1] - outputs[0]).abs().max() > 1e-3 * outputs[0].abs().max():
        raise NormLayerError(
            "record-level privacy: the model's output for an example depends on the others of its batch, and DP-SGD "
            f"would train it with one example at a time.\n{WAY_OUT}."
        )


def _call_with(model: nn.Module, values: Mapping[str, Tensor], inputs: Tensor) -> Any:
    """Return ``model(inputs)`` with ``values`` in place of the entries that they name, and of entries tied to these.

    Where torch finds the tied entries by itself (``tie_weights``), it leaves a module that is registered at two paths
    with the given values after the call: an optimizer would no longer train it.
    """
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    given = {own[name]: value for name, value in values.items()}
    entries = {}
    for path, module in model.named_modules():  # each module once
        for leaf, entry in (*module._parameters.items(), *module._buffers.items()):
            if entry in given:
                entries[f"{path}.{leaf}" if path else leaf] = given[entry]
    return functional_call(model, entries, (inputs,), tie_weights=False)
