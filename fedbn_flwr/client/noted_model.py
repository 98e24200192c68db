"""A model's parameters as they were noted, in a training loop that may move, change or
copy the model afterwards.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedbn_flwr.errors import ConfigError

__all__ = ["NotedModel"]


class _Noted(NamedTuple):
    parameter: nn.Parameter
    version: int
    value: Tensor


class NotedModel:
    """A model with its device and its parameters, as client hooks stored them or as the
    last step left them.

    A tensor's version tells whether torch has changed it, at no cost; its value tells
    whether the change remained. Some optimizers, as SAM, move the weights and put them
    back before a step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        tables = [
            module
            for module in model.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        ]
        # in each forward pass
        self._changing = {
            table.weight for table in tables if table.max_norm is not None
        }
        self._noted: dict[str, _Noted] = {}
        self._device = self._now()

    def note(self, parameters: Collection[Tensor] | None = None) -> None:
        """Note the present device, and the present values of all trainable parameters
        or of those among these.
        """
        self._device = self._now()
        for name, p in self._model.named_parameters():
            if (
                not p.requires_grad
                or p in self._changing
                or (parameters is not None and p not in parameters)
            ):
                continue
            known = self._noted.get(name)
            if (
                known is None
                or known.value.shape != p.shape
                or known.value.device != p.device
            ):
                self._noted[name] = _Noted(p, p._version, p.detach().clone())
            else:
                self._noted[name] = _Noted(p, p._version, known.value.copy_(p.detach()))

    def forget(self) -> None:
        """Release the values."""
        self._noted = {}

    def _now(self) -> torch.device | None:
        """Return the device of the model's first parameter; None without parameters."""
        return next((p.device for p in self._model.parameters()), None)

    def changed(self, thorough: bool = False) -> list[str]:
        """Return the parameters that have other values than noted; ``thorough``: also
        where the version is the same.

        A change as small as a rounding error is none.
        """
        now = dict(self._model.named_parameters())
        return [
            name
            for name, noted in self._noted.items()
            if now.get(name) is not noted.parameter
            or (
                (thorough or noted.parameter._version != noted.version)
                and _differ(noted.parameter, noted.value)
            )
        ]

    def check_device(self) -> None:
        """Check that the model is where it was when the hooks stored their tensors.

        Raises:
            ConfigError: it is not.
        """
        if (now := self._now()) != self._device:
            raise ConfigError(
                f"the model was on {self._device} when the method stored what it"
                f" compares with, and is on {now} now: call model.to(device) before"
                " `with bn_rules(...)`, and do not move the model inside it"
            )

    def check_parameters(self) -> None:
        """Check that the parameters are those that the hooks have stored as received.

        Raises:
            ConfigError: they are not.
        """
        if changed := self.changed():
            raise ConfigError(
                f"{len(changed)} parameters ('{changed[0]}', ...) have changed inside"
                " `with bn_rules(...)` before the first step, and the method compares"
                " with the model as it was received: load the received state before"
                " the block"
            )


def _differ(parameter: Tensor, value: Tensor) -> bool:
    """Return whether the values differ by more than the rounding of adding a number of
    size 1 and subtracting it.
    """
    if parameter.device != value.device:
        return True
    now, eps = parameter.detach(), torch.finfo(value.dtype).eps
    return bool(((now - value).abs() > 2 * eps * (1 + value.abs())).any())
