"""A client hook is known by its name, not by its class.

Two hooks of one class act as hooks of two classes do, in each way to train.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr import strategies
from fedbn_flwr.client import client_app
from fedbn_flwr.strategies import Ask, Method, Phase, Strategy, register
from fedbn_flwr.training import ClientHook, LearningRate, LocalTraining
from tests.support.federation import torch_clients
from tests.support.user_loops import (
    BATCH,
    SIZES,
    hooked_loop,
    loop_of_steps,
)

ROUNDS = 3


class Pull(ClientHook):
    """A hook with a change of the gradients, metrics and kept state."""

    sum: Tensor

    def __init__(self, name: str, strength: float) -> None:
        self.name, self.strength = name, strength

    def receive(self, sent: Any, kept: Any) -> None:
        self.sum = kept.get("sum", torch.zeros(1, dtype=torch.float64))

    def gradients(self, model: nn.Module) -> None:
        gradient = dict(model.named_parameters())["3.weight"].grad
        assert gradient is not None
        gradient *= 1 + 0.01 * self.strength * self.sum

    def around(self, step: int, model: nn.Module, batch_size: int) -> Any:
        self.sum += self.strength * step
        return nullcontext()

    def end(self, model: nn.Module) -> dict[str, float]:
        return {f"sum-{self.name}": float(self.sum)}

    def keep(self) -> dict[str, Tensor]:
        return {"sum": self.sum}


class Other(Pull):
    """The same hook in another class."""


def strategy_with(second: type[Pull]) -> type[Strategy]:
    """Return a strategy with two hooks."""

    class TwoMethod(Method):
        name = "two"
        role = "client-hooks"
        client_hooks = MappingProxyType(
            {
                "weak": lambda context: Pull("weak", 0.1),
                "strong": lambda context: second("strong", 0.4),
            }
        )

        def phases(self, num_rounds: int | None = None) -> tuple[Phase, ...]:
            return (Phase(kept="the sums"),)

        def on_clients(self, state: Any, facts: Any) -> list[Ask]:
            return [Ask("weak"), Ask("strong")]

    return type("Two", (Strategy,), {"method": register(TwoMethod)})


WAYS = ("train", "loop=", "bn_rules")


@pytest.mark.parametrize("way", WAYS)
def test_two_hooks_of_one_class_act_as_hooks_of_two_classes(
    way: str, mlp, datasets, user_app, run_app, monkeypatch
) -> None:
    """Their metrics, local states and models are those of the package's own loop."""
    monkeypatch.setattr(strategies, "_REGISTERED", [])

    def trained(second: type[Pull], way: str) -> dict[str, Any]:
        settings = LocalTraining(
            learning_rate=LearningRate(0.1),
            batch_size=BATCH,
            loop=loop_of_steps if way == "loop=" else None,
        )
        app = client_app(torch_clients(mlp, datasets, settings))
        if way == "bn_rules":
            app = user_app(hooked_loop)
        run = run_app(strategy_with(second)(), app, rounds=ROUNDS)
        found: dict[str, Any] = dict(run.state)
        for number, metrics in run.result.train_metrics_clientapp.items():
            for hook in ("weak", "strong"):
                found[f"round {number} {hook}"] = metrics[f"sum-{hook}"]
        for i in range(len(SIZES)):
            for name, array in run.kept(i)["fedbn-flwr.rules"].items():
                found[f"client {i} {name}"] = array
        return found

    oracle, found = trained(Other, "train"), trained(Pull, way)
    assert oracle.keys() == found.keys()
    for name, value in oracle.items():
        np.testing.assert_allclose(
            found[name], value, rtol=1e-9, atol=1e-12, err_msg=name
        )
