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
        # A table with a largest norm changes its weights in each forward pass.
        self._changing: set[Tensor] = set()
        for module in model.modules():
            if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                continue
            if module.max_norm is not None:
                self._changing.add(module.weight)
        self._noted: dict[str, _Noted] = {}
        self._device = self._now()

    def note(self, parameters: Collection[Tensor] | None = None) -> None:
        """Note the present device, and the present values of all trainable parameters
        or of those among these.
        """
        self._device = self._now()
        for name, p in self._model.named_parameters():
            if not p.requires_grad or p in self._changing:
                continue
            if parameters is not None and p not in parameters:
                continue
            # into the memory of the value before, where it fits: this is after each step
            value = self._noted[name].value if name in self._noted else None
            if value is None or value.shape != p.shape or value.device != p.device:
                value = p.detach().clone()
            else:
                value.copy_(p.detach())
            self._noted[name] = _Noted(p, p._version, value)

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
        changed = []
        for name, noted in self._noted.items():
            parameter = noted.parameter
            # A model that was moved or wrapped may have other parameter objects.
            other = now.get(name) is not parameter
            compare = thorough or parameter._version != noted.version
            if other or (compare and _differ(parameter, noted.value)):
                changed.append(name)
        return changed

    def check_device(self) -> None:
        """Check that the model is where it was when the hooks stored their tensors.

        Raises:
            ConfigError: it is not.
        """
        now = self._now()
        if now != self._device:
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
        changed = self.changed()
        if changed:
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
    now = parameter.detach()
    eps = torch.finfo(value.dtype).eps
    return bool(((now - value).abs() > 2 * eps * (1 + value.abs())).any())
