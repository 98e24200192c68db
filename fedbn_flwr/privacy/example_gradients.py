"""The sum of the examples' gradients, each clipped: what a step of DP-SGD adds noise to. Torch only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.privacy.called_with import call_with
from fedbn_flwr.training.losses import LossFn

__all__ = ["ClippedSum", "clipped_sum"]

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
            outputs = call_with(model, {**buffers, **values}, example[None])
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
