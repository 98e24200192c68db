"""A model's parameters at an earlier time, to detect later changes of the model.

A training loop may move, change or copy the model.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedbn_flwr.errors import ConfigError


class _Noted(NamedTuple):
    parameter: nn.Parameter
    version: int
    value: Tensor
    before: Tensor | None  # the value that was stored before


class NotedModel:
    """A model with its parameters at an earlier time.

    The earlier time is the moment when client hooks stored the parameters, or the end
    of the last step. A tensor's version reveals at no cost whether torch has changed
    the tensor. The value reveals whether the change remained: some optimizers, such as
    SAM, move the weights and restore them before a step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # An embedding with a maximum norm changes its weights in each forward pass.
        self._changing: set[Tensor] = set()
        for module in model.modules():
            if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                continue
            if module.max_norm is not None:
                self._changing.add(module.weight)
        self._noted: dict[str, _Noted] = {}
        self._latest: dict[str, _Noted] = {}  # noted in the last call of ``note``

    def note(self, parameters: Collection[Tensor] | None = None) -> None:
        """Store the present values of trainable parameters.

        If ``parameters`` is given, store only the values of those.
        """
        self._latest = {}
        for name, p in self._model.named_parameters():
            if not p.requires_grad or p in self._changing:
                continue
            if parameters is not None and p not in parameters:
                continue
            # Reuse the memory of an earlier value if it fits: this runs in every step.
            _, _, before, value = self._noted.get(name, (None,) * 4)
            if value is None or value.shape != p.shape or value.device != p.device:
                value = p.detach().clone()
            else:
                value.copy_(p.detach())
            self._latest[name] = _Noted(p, p._version, value, before)
        self._noted |= self._latest

    def forget(self) -> None:
        """Release the values."""
        self._noted = {}

    def changed(self, thorough: bool = False) -> list[str]:
        """Return the parameters whose values differ from the stored values.

        With ``thorough`` also compare values of the same version. A change as small as
        a rounding error does not count.
        """
        now = dict(self._model.named_parameters())
        changed = []
        for name, noted in self._noted.items():
            parameter = noted.parameter
            # A model that was moved or wrapped may have other parameter objects. During
            # a functional call, it has plain tensors instead of its parameters.
            present = now.get(name)
            other = present is not parameter
            if present is not None and not isinstance(present, nn.Parameter):
                other = False
            compare = thorough or parameter._version != noted.version
            if other or (compare and _differ(parameter, noted.value)):
                changed.append(name)
        return changed

    def replaced(self, thorough: bool = False) -> list[str]:
        """Return the changed parameters, or [] if a limit may have changed them.

        A limit of weights, such as a maximum norm, acts in a forward pass or after a
        step, and leaves other parameters as the step made them. Weights that are loaded
        differ in each parameter that the step has moved.
        """
        changed = self.changed(thorough)
        for name, noted in self._latest.items() if changed else ():
            moved = noted.before is not None and _differ(noted.value, noted.before)
            if moved and name not in changed:
                return []
        return changed

    def check_parameters(self) -> None:
        """Check that the parameters still have the values that the hooks have stored.

        Raises:
            ConfigError: they have changed.
        """
        changed = self.changed()
        if changed:
            raise ConfigError(
                f"{len(changed)} of the model's parameters ('{changed[0]}', ...)"
                " changed or moved to another device inside `with bn_rules(...)` before"
                " the first step, but the method compares with the received model: load"
                " the received state, and move the model, before the block"
            )


def _differ(parameter: Tensor, value: Tensor) -> bool:
    """Return whether the values differ by more than rounding errors.

    Adding a number of size 1 and subtracting it makes such errors.
    """
    if parameter.device != value.device:
        return True
    now = parameter.detach()
    eps = torch.finfo(value.dtype).eps
    return bool(((now - value).abs() > 2 * eps * (1 + value.abs())).any())
