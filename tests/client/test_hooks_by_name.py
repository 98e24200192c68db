"""A client hook is known by its name, not by its class.

Two hooks of one class act as hooks of two classes do, in each way to train.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr import strategies
from fedbn_flwr.client import client_app
from fedbn_flwr.messages.protocol import Continuity
from fedbn_flwr.strategies import Ask, Method, Phase, Strategy, register
from fedbn_flwr.training import ClientHook, LearningRate, LocalTraining
from tests.support.fast import fast
from tests.support.federation import torch_clients
from tests.support.user_loops import (
    BATCH,
    SIZES,
    compiled_loop,
    hooked_loop,
    loop_of_steps,
)

ROUNDS = 4


class Pull(ClientHook):
    """A hook with a penalty, a change of the gradients, metrics and kept state."""

    sum: Tensor
    weights: Tensor

    def __init__(self, name: str, strength: float) -> None:
        self.name, self.strength = name, strength

    def receive(self, sent: Any, kept: Any) -> None:
        self.sum = kept.get("sum", torch.zeros(1, dtype=torch.float64))

    def begin(self, model: nn.Module) -> None:
        self.weights = dict(model.named_parameters())["0.weight"].detach().clone()

    def penalty(self, model: nn.Module) -> Tensor:
        away = dict(model.named_parameters())["0.weight"] - self.weights
        return self.strength * away.square().sum()

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


@pytest.fixture
def trained(monkeypatch, tmp_path_factory, mlp, datasets, user_app, run_app) -> Any:
    """``trained(second, way, compiled)`` runs two rounds, and resumes the run."""
    monkeypatch.setattr(strategies, "_REGISTERED", [])

    def run(second: type[Pull], way: str, compiled: bool) -> dict[str, Any]:
        torch._dynamo.reset()
        folder = tmp_path_factory.mktemp("state")
        if way == "bn_rules":
            app = user_app(compiled_loop if compiled else hooked_loop)
        else:
            loop = loop_of_steps if way == "loop=" else None
            settings = LocalTraining(
                learning_rate=LearningRate(0.1), batch_size=BATCH, loop=loop
            )
            build = functools.partial(torch.compile, backend="eager")
            model = (lambda: build(mlp())) if compiled else mlp
            app = client_app(torch_clients(model, datasets, settings))
        nodes = {"node_configs": [{"state-dir": str(folder)}] * len(SIZES)}
        kind, start, before, found = strategy_with(second), None, None, {}
        for done in (0, ROUNDS // 2):
            strategy = kind()
            if before is not None:
                strategy.load_state_dict(before.state_dict(), done)
            strategy.continuity = Continuity("first", (done,))
            ended = run_app(
                strategy,
                app,
                rounds=done + ROUNDS // 2,
                start=start,
                barrier=False,
                grid_options={**nodes, "threads": 1},
            )
            start, before = ended.state, strategy
            for number, metrics in ended.result.train_metrics_clientapp.items():
                for hook in ("weak", "strong"):
                    found[f"round {number} {hook}"] = metrics[f"sum-{hook}"]
        for i in range(len(SIZES)):
            for name, array in ended.kept(i)["fedbn-flwr.rules"].items():
                found[f"client {i} {name}"] = array
        return {**found, **ended.state}

    return run


@pytest.mark.parametrize(
    ("way", "compiled"),
    [
        *(("train", False), ("loop=", False), ("bn_rules", True)),
        *fast([("train", True), ("loop=", True), ("bn_rules", False)]),
    ],
)
def test_two_hooks_of_one_class_act_as_hooks_of_two_classes(
    way: str, compiled: bool, trained
) -> None:
    oracle = trained(Other, "train", False)
    for second in (Pull, Other):
        found = trained(second, way, compiled)
        for name, value in oracle.items():
            np.testing.assert_allclose(
                found[name], value, rtol=1e-9, atol=1e-12, err_msg=name
            )
