"""A check at one client that the layers of a model can be synchronised."""

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
from fedbn_flwr.training.model_state import copied
from fedbn_flwr.training.randomness import seeded

# Number of passes with two examples. A layer that is skipped in half of the passes is
# missed in one of 128 models, because then all passes agree.
_PASSES = 8


def try_synchronised_step(model: nn.Module, inputs: Any, batch_size: int) -> None:
    """Check at one client that a model can take part in a synchronised step.

    The passes of such a step run without other clients. If the passes draw random
    numbers, more forward passes with other numbers follow. They find layers that are
    skipped at random, with high probability.

    Args:
        model: the model. It does not change, nor do the random generators, because a copy
            makes the passes.
        inputs: a batch on the model's device.
        batch_size: the number of examples in the batch.

    Raises:
        NormLayerError: a layer cannot be synchronised, none is called in train mode, or
            the passes call different layers.
    """
    model = copied(model)
    first, drawn = _pass(model.train(), inputs, batch_size, seed=0)
    # If the pass draws no random numbers, more passes would be equal.
    with seeded(0):
        draws = drawn != _next_numbers()
    with torch.no_grad():
        for seed in range(1, _PASSES if draws else 1):
            again, _ = _pass(model, inputs, batch_size, seed)
            _refuse_other_calls(first, again)


def _pass(
    model: nn.Module, inputs: Any, batch_size: int, seed: int
) -> tuple[list[str], list[float]]:
    """Run a forward pass, and a backward pass if gradients are on.

    Returns:
        The paths of the BatchNorm calls in order, "" for a functional call, and the
        next random numbers.

    Raises:
        NormLayerError: a layer cannot be synchronised, or none is called in train mode.
    """
    called = []

    def reduce(tag: str, tensor: Tensor) -> Tensor:
        # The tag is kind/k/path. A layer makes one exchange of moments in each call.
        kind, _, *path = tag.split("/")
        if kind == "moments":
            called.append("/".join(path))
        return tensor

    with (
        seeded(seed),
        # Pretend that two clients take part, because the batches together must be large
        # enough for every layer.
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
    return called, drawn


def _next_numbers() -> list[float]:
    """Draw a number from each default generator."""
    numbers = [random.random(), np.random.random_sample(), torch.rand(()).item()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        numbers.append(torch.rand((), device="cuda").item())
    return numbers


def _refuse_other_calls(first: Sequence[str], second: Sequence[str]) -> None:
    """Raise NormLayerError if two passes of one batch call different layers."""
    if first == second:
        return
    of_first, of_second = Counter(first), Counter(second)
    # If all counts are equal, only the order differs. Then name the first layer.
    odd = first[0]
    for path in [*first, *second]:
        if of_first[path] != of_second[path]:
            odd = path
            break
    raise NormLayerError(
        f"BatchNorm layer {odd!r} is called at random, such as in stochastic depth"
        f" ({of_first[odd]} and {of_second[odd]} calls in two passes of one batch, or"
        " another order). In a synchronised step every client must call the same layers"
        " in the same order. Disable this for training, or use a method without a"
        " synchronised step, such as fedavg or fedbn."
    )
