"""A check at one client that the layers of a model can be synchronised."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.sync.step import synchronised
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.training.batches import map_inputs
from fedbn_flwr.training.copying import copied
from fedbn_flwr.training.randomness import seeded

# Number of passes with two examples. A layer that is skipped in half of the passes is
# missed in one of 128 models, because then all passes agree.
_PASSES = 8


def try_synchronised_step(model: nn.Module, inputs: Any, batch_size: int) -> None:
    """Check at one client that a model can take part in a synchronised step.

    The passes of such a step run without other clients. Passes with other random numbers
    find layers that are skipped at random, with high probability.

    Args:
        model: the model; copies of it and of the inputs make the passes.
        inputs: a batch on the model's device.
        batch_size: the number of examples in the batch.

    Raises:
        NormLayerError: a layer cannot be synchronised, none is called in train mode, or
            the passes call different layers.
    """
    model = copied(model).train()
    first = _pass(model, inputs, batch_size, seed=0)
    with torch.no_grad():
        for seed in range(1, _PASSES):
            again = _pass(model, inputs, batch_size, seed)
            if again != first:
                odd = sorted({*first} ^ {*again}) or first
                raise NormLayerError(
                    f"BatchNorm layer {odd[0]!r} is called at random, such as in"
                    " stochastic depth: two passes of one batch call different layers,"
                    " or in another order. In a synchronised step every client must"
                    " call the same layers in the same order. Disable this for"
                    " training, or use a method without a synchronised step, such as"
                    " fedavg or fedbn."
                )


def _pass(model: nn.Module, inputs: Any, batch_size: int, seed: int) -> list[str]:
    """Run a forward pass, and a backward pass if gradients are on.

    Returns:
        The paths of the BatchNorm calls in order, "" for a functional call.

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
        loss = model(map_inputs(copy.deepcopy, inputs)).sum()
        if torch.is_grad_enabled():
            loss.backward()
    step.require_a_layer()
    return called
