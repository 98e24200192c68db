"""The model as client hooks stored it, in a training loop that may move, change or copy it afterwards."""

from __future__ import annotations

import torch
from torch import nn

from fedbn_flwr.errors import ConfigError

__all__ = ["ModelAtStart"]


class ModelAtStart:
    """A model, with its device and its parameters when client hooks stored them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.note()

    def note(self) -> None:
        """Take the model's present device and parameters for those that the hooks have stored."""
        tables = [module for module in self._model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
        changing = {id(table.weight) for table in tables if table.max_norm is not None}  # in each forward pass
        named = [(name, p) for name, p in self._model.named_parameters() if id(p) not in changing]
        self._versions = {name: (p, p._version) for name, p in named if not p.is_inference()}
        self._device = self._now()

    def _now(self) -> torch.device | None:
        """Return the device of the model's first parameter; None without parameters."""
        return next((p.device for p in self._model.parameters()), None)

    def check_device(self) -> None:
        """Check that the model is where it was when the hooks stored their tensors.

        Raises:
            ConfigError: it is not.
        """
        if (now := self._now()) != self._device:
            raise ConfigError(
                f"the model was on {self._device} when the method stored what it compares with, and is on {now} now: "
                "call model.to(device) before `with bn_rules(...)`, and do not move the model inside it"
            )

    def check_parameters(self) -> None:
        """Check that the parameters are those that the hooks have stored as received.

        Raises:
            ConfigError: they are not.
        """
        now = dict(self._model.named_parameters())
        changed = [n for n, (p, version) in self._versions.items() if now.get(n) is not p or p._version != version]
        if changed:
            raise ConfigError(
                f"{len(changed)} parameters ('{changed[0]}', ...) have changed inside `with bn_rules(...)` before the "
                "first step, and the method compares with the model as it was received: load the received state "
                "before the block"
            )

    def refuse_other_model(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ConfigError if the optimizer has no parameter of the model: the hooks would change nothing."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not held & {id(parameter) for parameter in self._model.parameters()}:
            raise ConfigError(
                "the optimizer has no parameter of the model that `bn_rules` was given: give both the same model, and "
                "no copy of it"
            )
