"""The optimizers of local training: torch's SGD, Adam and AdamW, with torch's defaults
beside our settings.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import nn

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.training.settings import LocalTraining
from fedbn_flwr.training.sgd import PlainSGD, sgd, sgd_step

__all__ = ["make_optimizer", "take_step"]


class _Adam(torch.optim.Adam):
    """Adam whose methods are called without torch's wrappers, which import the
    compiler; see ``sgd``.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class _AdamW(_Adam, torch.optim.AdamW):
    """AdamW, in the same way."""


def make_optimizer(
    model: nn.Module,
    settings: LocalTraining,
    known: Sequence[nn.Parameter] | None = None,
) -> torch.optim.Optimizer:
    """Return a new optimizer over the trainable parameters; ``known``: the model's
    parameters, None = they are found.

    SGD and Adam add the weight decay to the gradient; AdamW shrinks the weights by
    learning rate times weight decay.

    Raises:
        ConfigError: there are none.
    """
    parameters = [p for p in known or model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError(
            f"{type(model).__name__} has no parameter that requires a gradient: nothing"
            " to train"
        )
    if settings.optimizer == "sgd":
        return sgd(model, settings, parameters)
    kind = _Adam if settings.optimizer == "adam" else _AdamW
    return kind(
        parameters, settings.learning_rate.initial, weight_decay=settings.weight_decay
    )


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Do ``optimizer.step()``, with the same bits."""
    # a user's may have Nesterov momentum, or hooks around its step
    if type(optimizer) is PlainSGD:
        sgd_step(optimizer)
    else:
        optimizer.step()
