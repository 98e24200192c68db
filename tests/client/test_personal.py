"""Entries that a user names with ``personal`` stay with the clients.

They add to the method's local entries. The networks are torchvision's in float64, and
the clients have different sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.errors import ConfigError, FedBNError
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.mods import bn_rules
from fedbn_flwr.strategies import (
    Ditto,
    FedAvg,
    FedBN,
    FedRep,
    FedTAN,
    FixBN,
    Scaffold,
    combined,
)
from fedbn_flwr.training import LearningRate, LocalTraining
from tests.support.fast import fast
from tests.support.user_loops import SIZES, hooked_loop
from tests.support.written_out import (
    below,
    close,
    network,
    numbers,
)


@pytest.fixture
def datasets(points: Any) -> list[Any]:
    """Return the images of three clients of different sizes."""
    return [points(n, i, shape=(3, 16, 16)) for i, n in enumerate(SIZES)]


@pytest.mark.parametrize("given", fast([False, True], 1))
def test_a_head_of_another_shape_starts_as_its_client_builds_it(
    run_strategy: Any, datasets: Any, given: bool
) -> None:
    """Clients 1 and 2 have five classes and one function that builds their model.

    The learning rate is too small to move a weight.
    """
    five = functools.partial(network, classes=5)
    builds = [network, five, five]
    training = LocalTraining(learning_rate=LearningRate(1e-300), batch_size=4)
    models = {i: build() for i, build in enumerate(builds)}

    def client_fn(context: Any) -> TorchClient:
        i = int(context.node_config["partition-id"])
        model = models[i] if given else builds[i]
        data = datasets[i]
        return TorchClient(model, data, data, training, context=context, seed=7)

    strategy = FedAvg(personal="classifier", parts=split_state(network()))
    app = client_app(client_fn)
    run = run_strategy(strategy, app, network().state_dict(), 3, rounds=2)
    assert [report.rejected for report in strategy.reports] == [{}] * 2
    stays = below(network(), "classifier.")
    for i, build in enumerate(builds):
        assert {*run.local_state(i)} == stays
        close(run.local_state(i), {n: numbers(build())[n] for n in stays})
    # Shared entries must fit.
    strategy = FedAvg(personal="features.norm0", parts=split_state(network()))
    run_strategy(strategy, app, five().state_dict(), 3, rounds=1)
    assert len(strategy.reports[0].rejected) == 1


class AnyHead(nn.Linear):
    """A layer that accepts weights of any shape, as a user's app may."""

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        for leaf in ("weight", "bias"):
            self.register_parameter(leaf, nn.Parameter(state[prefix + leaf].clone()))


def with_any_head() -> nn.Module:
    model = network()
    head = AnyHead(model.classifier.in_features, 3).double()
    head.load_state_dict(model.classifier.state_dict())
    model.classifier = head
    return model


def five_classes(model: nn.Module, data: Any, msg: Any, context: Any) -> float:
    """Train clients 1 and 2 from their own heads."""
    first = len(model.classifier.weight) == 3
    if first and int(context.node_config["partition-id"]):
        model.classifier.load_state_dict(network(classes=5).classifier.state_dict())
    return hooked_loop(model, data, msg, context)


def test_a_hook_keeps_arrays_beside_a_head_of_another_shape_under_the_mod(
    user_app: Any, run_app: Any, run_strategy: Any, datasets: Any
) -> None:
    def strategy() -> Any:
        split = split_state(network(), personal="classifier")
        return combined(FedBN, Scaffold)(parts=split)

    app = user_app(five_classes, model=with_any_head)
    found = run_app(strategy(), app, model=network, rounds=2)
    assert [report.rejected for report in found.strategy.reports] == [{}] * 2

    def client_fn(context: Any) -> TorchClient:
        i = int(context.node_config["partition-id"])
        build, data = functools.partial(network, classes=5 if i else 3), datasets[i]
        training = LocalTraining(learning_rate=LearningRate(0.1), batch_size=4)
        return TorchClient(build, data, data, training, context=context, seed=7)

    wanted = run_strategy(
        strategy(), client_app(client_fn), network().state_dict(), 3, rounds=2
    )
    close(found.state, wanted.state)
    for i in range(3):
        close(found.local_state(i), wanted.local_state(i))


def prepared(strategy: Any, by_names: bool = False) -> None:
    if not by_names:
        strategy.parts = split_state(network())
    strategy.prepare(to_record(network().state_dict()), 200, 1)


WRONG: dict[str, Callable[[], Any]] = {
    "no entry": lambda: prepared(FedAvg(personal="classifier,clasifier.*")),
    "no class": lambda: prepared(FedAvg(personal="type:LayerNorm")),
    "names have no classes": lambda: prepared(
        FedAvg(personal="type:Linear"), by_names=True
    ),
    "everything, with batchnorm": lambda: prepared(
        FedBN(personal="type:Conv2d,type:Linear")
    ),
    "fedtan's batchnorm": lambda: prepared(FedTAN(personal="features.norm0")),
}


@pytest.mark.parametrize("make", WRONG.values(), ids=list(WRONG))
def test_what_cannot_stay_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(FedBNError):
        make()


@pytest.mark.parametrize("method", [FedTAN, FixBN, combined(FedBN, Scaffold)])
def test_a_head_can_stay_beside_any_method_that_shares_batchnorm(method: Any) -> None:
    strategy = method(personal="classifier.*,features.norm0.weight")
    if method is FedTAN:
        strategy = method(personal="classifier.*")
    prepared(strategy)
    # A layer that the method leaves to FedAvg may stay as a whole.
    if method is FixBN:
        prepared(method(layers="*.denseblock1", personal="features.norm0"))
    assert below(network(), "classifier.") <= set(strategy.run.local_entries)


@pytest.mark.parametrize("other", ["features.norm0", ""])
def test_a_run_goes_on_with_the_entries_that_its_clients_keep(
    federate: Any, datasets: Any, other: str
) -> None:
    run = federate(FedAvg(personal="classifier"), network, datasets, rounds=1)
    strategy = FedAvg(personal=other)
    strategy.load_state_dict(run.strategy.state_dict(), 1)
    with pytest.raises(ConfigError):
        federate(strategy, network, datasets, rounds=2)


def test_a_pattern_names_the_entries_of_a_class() -> None:
    found = split_state(model := network("vit"), personal="type:LayerNorm").personal
    assert {*found} == {name for name in model.state_dict() if "ln" in name}


def test_a_pattern_of_no_entry_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        split_state(network(), personal="classifer")
    assert "'classifier'" in str(caught.value)


def test_a_second_model_and_fine_tuning_need_a_torch_client(
    user_app: Any, run_app: Any
) -> None:
    with pytest.raises(FedBNError):
        run_app(Ditto(), user_app(hooked_loop, model=network), model=network, rounds=1)


def fails_at_once(model: nn.Module, data: Any, msg: Any, context: Any) -> float:
    """Let client 0 raise after its first step, a step of its head."""
    if context.node_config["partition-id"]:
        return hooked_loop(model, data, msg, context)
    with bn_rules(model, msg, context) as rules:
        optimizer = rules.wrap(torch.optim.SGD(model.parameters(), 0.1))
        model(data.inputs).sum().backward()
        optimizer.step()
        raise ValueError("the user's")


def test_a_users_loop_may_have_errors_of_its_own(user_app: Any, run_app: Any) -> None:
    app = user_app(fails_at_once, model=network)
    run = run_app(FedRep(head_steps=1), app, model=network, rounds=1)
    assert "the user's" in run.reason(0)
