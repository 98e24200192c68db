"""A user's NumPyClient that gets and returns the whole state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from flwr.app import Context
from flwr.client import NumPyClient
from torch import nn
from torch.nn import functional as F

from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.messages.records import to_state
from tests.support.user_loops import BATCH, ruled


class TheirClient(NumPyClient):
    """A client that uses the package only in the three lines of ``ruled``.

    Without these lines, it does not use the package.
    """

    has_rules = True
    momentum = 0.0

    def __init__(self, model: nn.Module, data: Any, context: Context) -> None:
        self.model, self.data, self.context = model, data, context

    def get_properties(self, config: dict) -> dict:
        return {"num-examples": len(self.data), "batch-size": BATCH}

    def fit(self, parameters: list[Array], config: dict):
        self.set(parameters)
        told = config if self.has_rules else {}
        ruled(
            self.model,
            self.data,
            told,
            int(config["server-round"]),
            self.context,
            self.momentum,
        )
        return self.state(), len(self.data), {"score": 0.5, "word": "fine"}

    def evaluate(self, parameters: list[Array], config: dict):
        self.set(parameters)
        self.model.eval()
        loss = F.cross_entropy(self.model(self.data.inputs), self.data.targets)
        return float(loss.detach()), len(self.data), {}

    def state(self) -> list[Array]:
        return list(to_state(self.model.state_dict()).values())

    def set(self, parameters: list[Array]) -> None:
        names = self.model.state_dict()
        self.model.load_state_dict(
            {n: torch.tensor(p) for n, p in zip(names, parameters, strict=True)}
        )


def numpy_clients(
    model: Callable[[], nn.Module],
    datasets: list,
    kind: type[TheirClient] = TheirClient,
    **attributes: Any,
) -> Callable[[Context], Any]:
    """Return a project's ``client_fn`` over ``datasets``.

    ``attributes`` become attributes of the client's class.
    """
    made = type(kind.__name__, (kind,), attributes)

    def client_fn(context: Context):
        return made(
            model(), datasets[int(context.node_config["partition-id"])], context
        ).to_client()

    return client_fn
