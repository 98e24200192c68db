"""Whether the layers of a model can be synchronised, found out by one client on its own."""

from __future__ import annotations

from typing import Any

from torch import nn

from fedbn_flwr.batchnorm.sync.step import synchronised
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.norms.renorm import BatchRenorm
from fedbn_flwr.training.modes import kept_modes
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.wrappers import load_state

__all__ = ["refuse_batch_renorm", "try_synchronised_step"]


def refuse_batch_renorm(model: nn.Module) -> None:
    """Check that no layer corrects its statistics locally.

    Raises:
        NormLayerError: one does; the message has its path.
    """
    if layers := [path for path, layer in model.named_modules() if isinstance(layer, BatchRenorm)]:
        raise NormLayerError(
            f"layer '{layers[0]}' is batch-renorm, whose correction comes from local statistics: it cannot be "
            "synchronised. Use norm=batch."
        )


def try_synchronised_step(model: nn.Module, inputs: Any, batch_size: int) -> None:
    """Do a forward and a backward pass as in a synchronised step, without other clients and with no effect.

    Args:
        model: its state, modes and random numbers do not change; its gradients are removed.
        inputs: a batch on the model's device.
        batch_size: its number of examples.

    Raises:
        NormLayerError: a layer cannot be synchronised, or none is called in train mode.
    """
    refuse_batch_renorm(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        with (
            seeded(0),
            kept_modes(model),
            # the union is large enough for every layer
            synchronised(
                model.train(),
                lambda tag, tensor: tensor,
                batch_size=batch_size,
                union_batch_size=2 * batch_size,
                exchanges="2L+1",
                backward="global",
            ) as step,
        ):
            model(inputs).sum().backward()
        step.require_a_layer()
    finally:
        model.zero_grad(set_to_none=True)
        load_state(model, before)
