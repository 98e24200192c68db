"""Whether the layers of a model can be synchronised, found out by one client on its
own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.sync.step import synchronised
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.norms.renorm import BatchRenorm
from fedbn_flwr.training.modes import kept_modes
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.wrappers import load_state

__all__ = ["refuse_batch_renorm", "try_synchronised_step"]

# of two examples; a layer that is skipped half of the time is missed once in 128 models
_PASSES = 8


def refuse_batch_renorm(model: nn.Module) -> None:
    """Check that no layer corrects its statistics locally.

    Raises:
        NormLayerError: one does; the message has its path.
    """
    if layers := [
        path for path, layer in model.named_modules() if isinstance(layer, BatchRenorm)
    ]:
        raise NormLayerError(
            f"layer '{layers[0]}' is batch-renorm, whose correction comes from local"
            " statistics: it cannot be synchronised. Use norm=batch."
        )


def try_synchronised_step(model: nn.Module, inputs: Any, batch_size: int) -> None:
    """Do a forward and a backward pass as in a synchronised step, without other clients
    and with no effect.

    If the passes draw random numbers, further forward passes with others find layers
    that are skipped at random, if not surely.

    Args:
        model: its state, modes and random numbers do not change; its gradients are
            removed.
        inputs: a batch on the model's device.
        batch_size: its number of examples.

    Raises:
        NormLayerError: a layer cannot be synchronised, none is called in train mode, or
            the passes call other layers.
    """
    refuse_batch_renorm(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        with kept_modes(model):
            first, drawn = _pass(model.train(), inputs, batch_size, seed=0)
            with seeded(0):
                draws = drawn != _next_numbers()
            with torch.no_grad():
                for seed in range(1, _PASSES if draws else 1):
                    _refuse_other_calls(
                        first, _pass(model, inputs, batch_size, seed)[0]
                    )
    finally:
        model.zero_grad(set_to_none=True)
        load_state(model, before)


def _pass(
    model: nn.Module, inputs: Any, batch_size: int, seed: int
) -> tuple[list[str], list[float]]:
    """Do a forward pass, and a backward pass if gradients are on.

    Returns:
        The paths of the BatchNorm calls in order, "" for a functional one, and the
        random numbers that come next.

    Raises:
        NormLayerError: a layer cannot be synchronised, or none is called in train mode.
    """
    tags: list[str] = []

    def reduce(tag: str, tensor: Tensor) -> Tensor:
        tags.append(tag)
        return tensor

    with (
        seeded(seed),
        # the union is large enough for every layer
        synchronised(
            model,
            reduce,
            batch_size=batch_size,
            union_batch_size=2 * batch_size,
            exchanges="2L+1",
            backward="global",
        ) as step,
    ):
        loss = model(inputs).sum()
        if torch.is_grad_enabled():
            loss.backward()
        drawn = _next_numbers()
    step.require_a_layer()
    return [
        "/".join(tag.split("/")[2:]) for tag in tags if tag.startswith("moments/")
    ], drawn


def _next_numbers() -> list[float]:
    """Draw a number from each default generator."""
    numbers = [random.random(), np.random.random_sample(), torch.rand(()).item()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        numbers.append(torch.rand((), device="cuda").item())
    return numbers


def _refuse_other_calls(first: Sequence[str], second: Sequence[str]) -> None:
    """Raise NormLayerError if two passes of one batch call other layers."""
    if first == second:
        return
    counts = Counter(first), Counter(second)
    odd = next(
        (path for path in [*first, *second] if counts[0][path] != counts[1][path]),
        first[0],
    )
    numbers = " and ".join(str(count[odd]) for count in counts)
    raise NormLayerError(
        f"BatchNorm layer {odd!r} is called at random, as in stochastic depth"
        f" ({numbers} calls in two passes of one batch, or another order): in a"
        " synchronised step every client must call the same layers in the same order."
        " Switch that off for training, or use a method without a synchronised step,"
        " as fedavg or fedbn."
    )
