"""The layer of HBN, its messages and its refusals.

``tests/reference`` has the description in plain torch.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.client import TorchClient
from fedbn_flwr.client.bn_rules import Hooks
from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.messages.protocol import HOOKS
from fedbn_flwr.messages.records import from_record, num_bytes
from fedbn_flwr.strategies import HBN
from fedbn_flwr.strategies.hbn import MixedStatistics, Survey, mixed_forward
from fedbn_flwr.transport.hook_context import HookContext
from tests.support.many_layers import two_layers
from tests.support.written_out import close

SIZES = (6, 13, 9)
TRACKED = ("running_mean", "running_var", "num_batches_tracked")


# --- the layer --------------------------------------------------------------------------
@pytest.mark.parametrize("trains", [True, False])
def test_a_layer_at_the_ends_of_alpha_is_batchnorm(trains: bool) -> None:
    x = torch.randn(3, 2, 4, 2, 2, dtype=torch.float64)
    layer = nn.BatchNorm3d(2).double()
    layer.running_mean += 1
    alpha = torch.full((2,), -800.0 if trains else 800.0, dtype=torch.float64)
    mixed = mixed_forward(layer, alpha, x)
    torch.testing.assert_close(mixed, layer.train(trains)(x))


def test_one_example_is_enough_and_a_layer_in_eval_mode_does_not_mix() -> None:
    layer, x = nn.BatchNorm1d(3).double(), torch.rand(1, 3, dtype=torch.float64)
    alpha = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    # The variance is half of 1.
    y = x / 2 / (0.5 + layer.eps) ** 0.5
    torch.testing.assert_close(mixed_forward(layer, alpha, x), y)
    assert torch.equal(mixed_forward(layer.eval(), alpha, x), layer(x))
    # No rows have no statistics, which would make alpha NaN.
    empty = mixed_forward(layer.train(), alpha, x[:0])
    assert torch.autograd.grad(empty.sum(), alpha, allow_unused=True) == (None,)


# --- the round --------------------------------------------------------------------------
def test_messages_have_only_the_model_and_alpha_stays(federate, datasets) -> None:
    run = federate(HBN(), two_layers, datasets, rounds=2)
    hooks = [json.loads(config[HOOKS]) for config in run.grid.config()]
    assert hooks == [["survey"]] * 3 + [["survey", "mixed-statistics"]] * 3
    counts = []
    for down, up in run.grid.pairs():
        (model,), (reply,) = (one.content.array_records.values() for one in (down, up))
        assert num_bytes(model) == num_bytes(reply)
        state = from_record(reply)
        assert state.keys() == run.state.keys()
        counts += [int(state[f"{path}.num_batches_tracked"]) for path in "14"]
    assert sorted(counts) == sorted([*SIZES] * 4)


def test_a_loop_of_the_user_takes_the_same_steps(federate, datasets) -> None:
    """The loop has a schedule and two optimizers, and clears only the model."""

    def loop(model, batches, rules, learning_rate) -> float:
        optimizers = []
        for part in (model[:3], model[3:]):
            sgd = torch.optim.SGD(part.parameters(), 1.0, momentum=0.5)
            optimizers.append(rules.wrap(sgd))
        for inputs, targets in batches:
            model.zero_grad()
            with rules.step(len(targets)):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
            for sgd in optimizers:
                sgd.param_groups[0]["lr"] = learning_rate
                sgd.step()
                assert {group["lr"] for group in sgd.param_groups} == {0.1}
        return float(loss.detach())

    ours = federate(HBN(), two_layers, datasets, loop=loop)
    theirs = federate(HBN(), two_layers, datasets, sgd_momentum=0.5)
    close(ours.state, theirs.state, rtol=1e-9)


class Auxiliary(nn.Module):
    """A model with a layer that only the training calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.late = two_layers(), nn.BatchNorm1d(3).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        return self.late(y) if torch.is_grad_enabled() else y


def test_a_layer_that_no_pass_measured_keeps_its_global_statistics(
    federate, datasets
) -> None:
    run = federate(HBN(), Auxiliary, datasets, rounds=2)
    start = run.history[0]
    for leaf in TRACKED:
        name = f"late.{leaf}"
        assert np.array_equal(run.state[name], start[name])
    assert not np.array_equal(run.state["late.weight"], start["late.weight"])


def test_the_end_of_a_round_restores_model_and_optimizer(mlp, points) -> None:
    model, hook = mlp(), MixedStatistics()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    rules = Hooks(model, {"mixed-statistics": hook})
    with rules.block():
        rules.wrap(sgd)
        assert "forward" in vars(model[1])
        points(8).loss(model).backward()
        sgd.step()
    assert "forward" not in vars(model[1])
    assert len(sgd.param_groups) == 1
    assert hook.keep()["1.alpha"].any()


def only_the_head(model: nn.Module, data) -> None:
    """Train the head on features without a gradient."""
    with torch.no_grad():
        features = model[:3](data.inputs)
    nn.functional.cross_entropy(model[3:](features), data.targets).backward()


def only_the_model(model: nn.Module, data) -> None:
    data.loss(model).backward(inputs=[*model.parameters()])


def by_hand(model: nn.Module, data) -> None:
    own = [*model.parameters()]
    for p, gradient in zip(
        own, torch.autograd.grad(data.loss(model), own), strict=True
    ):
        p.grad = gradient


def usual(model: nn.Module, data) -> None:
    data.loss(model).backward()


@pytest.mark.parametrize(
    ("backward", "kind", "words"),
    [
        (
            by_hand,
            torch.optim.SGD,
            r"no step had a gradient of alpha: .* loss.backward\(",
        ),
        (only_the_model, torch.optim.SGD, "no step had a gradient of alpha"),
        (usual, torch.optim.LBFGS, "alpha, but LBFGS takes only one group"),
        (only_the_head, torch.optim.SGD, ""),
    ],
)
def test_a_loop_in_which_alpha_cannot_learn_is_refused(
    backward, kind, words: str, mlp, points
) -> None:
    """A loop that trains only the head has no gradient of a BatchNorm layer."""
    model = mlp()
    rules = Hooks(model, {"mixed-statistics": MixedStatistics()})

    def train() -> None:
        with rules.block():
            optimizer = rules.wrap(kind(model.parameters(), 0.1))
            backward(model, points(8))
            optimizer.step()

    if words:
        with pytest.raises(ConfigError, match=words):
            train()
    else:
        train()
    assert "forward" not in vars(model[1])


# --- refusals ---------------------------------------------------------------------------
def test_a_layer_with_a_replaced_forward_pass_is_refused(mlp) -> None:
    model = mlp()
    model[1].forward = model[1].forward
    with pytest.raises(NormLayerError, match="layer '1' was replaced"):
        MixedStatistics().begin(model)
    model[1].eval()
    MixedStatistics().begin(model)  # the layer keeps its forward pass


def test_a_loop_outside_of_a_client_has_no_data_to_survey() -> None:
    with pytest.raises(ConfigError, match="so it needs a TorchClient"):
        Survey(HookContext({}))


class Weighted(TorchClient):
    """A client with a small weight that is not its number of examples."""

    def fit(self, *args: Any) -> Any:
        arrays, count, metrics = super().fit(*args)
        return arrays, count, {**metrics, "share": 1e-9}

    def evaluate(self, *args: Any) -> Any:
        loss, count, metrics = super().evaluate(*args)
        return loss, count, {**metrics, "share": 1e-9}


@pytest.mark.parametrize("key", ["num-examples", "share"])
def test_a_fixed_layer_keeps_its_counter_and_an_example_may_have_many_values(
    federate, datasets, key: str
) -> None:
    """Layer 1 of (N, 1, 5) counts 5 values an example, and is repeated to 1.1 million.

    The bound on the values does not depend on the weight.
    """

    def model() -> nn.Module:
        torch.manual_seed(0)
        wide = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Upsample(scale_factor=22000))
        body = [wide, nn.BatchNorm1d(1), nn.AdaptiveAvgPool1d(5), nn.Flatten()]
        built = nn.Sequential(*body, nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
        built[4].num_batches_tracked.fill_(7)
        return built

    strategy = HBN(train_only="1,5", weighted_by_key=key)
    run = federate(strategy, model, datasets, rounds=1, client=Weighted)
    assert [report.rejected for report in run.reports] == [{}]
    assert run.state["4.num_batches_tracked"] == 7
