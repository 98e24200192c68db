"""FedRep and Ditto against their algorithms written out; fine-tuning before a test."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from fedbn_flwr.client.hooks import Hooks
from fedbn_flwr.errors import ConfigError, FedBNError
from fedbn_flwr.messages.records import to_state
from fedbn_flwr.strategies import (
    FBN,
    HBN,
    Ditto,
    FedAvg,
    FedBN,
    FedRep,
    FedTAN2,
    FixBN,
    RunSettings,
    Standalone,
    StaticBN,
    combined,
    ditto,
)
from fedbn_flwr.strategies.fedrep import FedRepMethod, HeadThenBody
from fedbn_flwr.training import LearningRate
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.freezing import layers_of
from tests.support.user_loops import SIZES
from tests.support.written_out import (
    State,
    below,
    close,
    loaded,
    mean,
    network,
    numbers,
    sgd,
    steps,
)

NETWORKS = {"densenet": "classifier.", "mobilenet_v2": "classifier."}
RATE = 0.005


@pytest.fixture
def datasets(points: Any) -> list[Any]:
    """The images of three clients of different sizes."""
    return [points(n, i, shape=(3, 16, 16)) for i, n in enumerate(SIZES)]


def personal_model(run: Any, client: int) -> State:
    """What a client keeps of its second model."""
    kept = run.context(client).state["fedbn-flwr.rules"]
    entries = {name: array.numpy() for name, array in kept.items()}
    return {name.removeprefix("own-model/"): a for name, a in entries.items()}


def only(model: nn.Module, trains: Any) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name))
    return model


@pytest.mark.parametrize("head_steps", [0, 1, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_fedrep_trains_the_head_and_then_the_body(
    federate: Any, datasets: Any, name: str, head_steps: int
) -> None:
    """Three clients, two rounds of three steps."""
    build = functools.partial(network, name)
    head = below(build(), NETWORKS[name])
    strategy = FedRep(head_steps=head_steps)
    run = federate(strategy, build, datasets, rounds=2, rate=RATE, local_epochs=2)
    assert [report.rejected for report in strategy.reports] == [{}, {}]

    shared = {n: a for n, a in numbers(build()).items() if n not in head}
    clients = [numbers(build()) for _ in SIZES]
    for server_round in (1, 2):
        for i, data in enumerate(datasets):
            model = loaded(build, {**clients[i], **shared})
            batches = list(steps(data, server_round, i, local_epochs=2))
            only(model, head.__contains__)
            sgd(model, batches[:head_steps], RATE)
            only(model, lambda entry: entry not in head)
            clients[i] = sgd(model, batches[head_steps:], RATE)
        shared = mean(clients, shared)
        close(run.history[server_round], shared)
    for i in range(3):
        close(run.local_state(i), {entry: clients[i][entry] for entry in head})
        if not head_steps:
            close(run.local_state(i), {n: numbers(build())[n] for n in head})


def test_fedrep_with_fedbn_keeps_both_and_other_heads_by_their_names(
    federate: Any, datasets: Any
) -> None:
    strategy = combined(FedBN, FedRep)(head_steps=1, personal="classifier,*denseblock3")
    run = federate(strategy, network, datasets, rounds=1, rate=RATE)
    own = set(run.local_state(0))
    assert below(network(), "classifier.", "features.denseblock3.") < own
    assert "features.norm0.running_mean" in own


@pytest.mark.parametrize("strength", [0.0, 0.5])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", [FedAvg, FedBN])
def test_ditto_trains_a_model_of_its_own_near_the_received_one(
    federate: Any,
    datasets: Any,
    same_bits: Any,
    method: Any,
    name: str,
    strength: float,
) -> None:
    """Beside FedAvg or FedBN, whose model does not know of it."""
    build = functools.partial(network, name)
    strategy = combined(method, Ditto)(proximal_mu=strength)
    run = federate(strategy, build, datasets, rounds=2, rate=RATE)
    assert [report.rejected for report in strategy.reports] == [{}, {}]
    plain = federate(method(), build, datasets, rounds=2, rate=RATE)
    for mine, wanted in zip(run.history, plain.history, strict=True):
        same_bits(mine, wanted)
    alone = federate(Standalone(), build, datasets, rounds=2, rate=RATE)
    for i, data in enumerate(datasets):
        found = personal_model(run, i)
        if not strength:
            same_bits(found, alone.local_state(i))
        of_client = strategy.reports[-1].evaluations[str(i)]
        tested = evaluate(loaded(build, found), data)
        assert of_client["loss"] == pytest.approx(tested.loss, rel=1e-11)
        if method is FedBN:
            continue
        # lambda pulls towards the model that the client has received in the round
        own = numbers(build())
        for server_round in (1, 2):
            sent = run.history[server_round - 1]

            def pull(entry: str, p: torch.Tensor, sent: Any = sent) -> torch.Tensor:
                return strength * (p - torch.tensor(sent[entry]))

            model = loaded(build, own)
            own = sgd(model, steps(data, server_round, i), RATE, pull)
        close(found, own)


@pytest.mark.parametrize("number", [0, 3])
def test_a_client_trains_before_its_test_and_forgets_it(
    federate: Any, datasets: Any, same_bits: Any, number: int
) -> None:
    strategy = FedRep(head_steps=0, fine_tune=number)
    run = federate(strategy, network, datasets, rounds=2, rate=RATE)
    plain = federate(FedRep(head_steps=0), network, datasets, rounds=2, rate=RATE)
    for mine, wanted in zip(run.history, plain.history, strict=True):
        same_bits(mine, wanted)
    for i, data in enumerate(datasets):
        same_bits(run.local_state(i), plain.local_state(i))
        model = loaded(network, {**run.state, **run.local_state(i)})
        sgd(
            model,
            steps(data, 2, i, local_epochs=0, local_steps=number) if number else [],
            RATE,
        )
        tested = evaluate(model, data)
        of_client = strategy.reports[-1].evaluations[str(i)]
        assert of_client["loss"] == pytest.approx(tested.loss, rel=1e-11)
        assert to_state(model.state_dict()).keys() == run.state.keys()


TUNED: dict[str, tuple[Any, dict[str, Any]]] = {
    "fedavg": (FedAvg, {}),
    "fedbn": (FedBN, {}),
    "agc": (FedAvg, {"agc": 0.01}),
    "fixbn": (FixBN, {"freeze_at": 1}),
    "fixbn of some layers": (FixBN, {"freeze_at": 1, "layers": "*norm0"}),
    "fixbn with gamma": (FixBN, {"freeze_at": 1, "freeze_affine": True}),
    "fixbn before T*": (FixBN, {"freeze_at": 9}),
    "fedtan2": (FedTAN2, {"fedtan_rounds": 1}),
    "fbn": (FBN, {"statistics_momentum": 0.0}),
    "fbn by a pass": (FBN, {"statistics_momentum": 0.0, "fbn_measure": "pass"}),
    "hbn": (HBN, {"statistics_momentum": 0.0}),
    "ditto": (
        combined(Ditto, FixBN),
        {"freeze_at": 1, "proximal_mu": 0.0, "agc": 0.01},
    ),
}


@pytest.mark.parametrize("case", TUNED)
def test_fine_tuning_trains_as_the_round_does(
    federate: Any, datasets: Any, case: str
) -> None:
    """A client alone, whose batches are all its data: the test after three steps of
    fine-tuning is that after one more round. BatchNorm's mode, alpha, clipping and the
    rate are those of the round.
    """
    kind, settings = TUNED[case]
    losses = []
    for rounds, fine_tune in ((2, 3), (3, 0)):
        strategy = kind(
            min_train_nodes=1,
            min_evaluate_nodes=1,
            min_available_nodes=1,
            fine_tune=fine_tune,
            **settings,
        )
        rate = LearningRate(0.02, ("freeze",), (0.5,))
        full = {"batch_size": 0, "local_steps": 3, "rate": rate}
        federate(strategy, network, datasets[:1], rounds=rounds, **full)
        losses.append(strategy.reports[-1].evaluations["0"]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_fine_tuning_with_staticbn_does_not_move_the_measured_statistics(
    federate: Any, datasets: Any
) -> None:
    strategy, full = StaticBN(fine_tune=3), {"batch_size": 0, "local_steps": 3}
    run = federate(strategy, network, datasets, rounds=1, rate=RATE, **full)
    for i, data in enumerate(datasets):
        model = loaded(network, run.state)
        for layer in layers_of(model).values():
            layer.momentum = 0.0
        sgd(model, [(data.inputs, data.targets)] * 3, RATE)
        tested = strategy.reports[-1].evaluations[str(i)]["loss"]
        assert tested == pytest.approx(evaluate(model, data).loss, rel=1e-9)


def test_the_own_model_is_found_by_what_its_hook_declares(
    federate: Any, datasets: Any, monkeypatch: Any
) -> None:
    run = functools.partial(federate, rounds=2, rate=RATE)
    known = run(Ditto(proximal_mu=0.5), network, datasets)
    renamed = type("Another", (ditto.PersonalModel,), {})
    monkeypatch.setattr(ditto, "PersonalModel", renamed)
    found = run(Ditto(proximal_mu=0.5), network, datasets)
    for mine, wanted in zip(
        found.strategy.reports, known.strategy.reports, strict=True
    ):
        assert mine.evaluations == wanted.evaluations


WRONG = {
    "no step for the body": lambda f, d: f(
        FedRep(head_steps=2), network, d[:2], rounds=1, local_steps=2
    ),
    "no such head": lambda f, d: f(FedRep(personal="head"), network, d, rounds=1),
    "no parameter in the head": lambda f, d: f(
        FedRep(personal="*running_mean"), network, d, rounds=1
    ),
    "fixbn's statistics": lambda f, d: f(
        combined(FedRep, FixBN)(personal="*norm0"), network, d, rounds=1
    ),
}


@pytest.mark.parametrize("run", WRONG.values(), ids=list(WRONG))
def test_what_does_not_fit_is_refused(federate: Any, datasets: Any, run: Any) -> None:
    with pytest.raises(FedBNError):
        run(federate, datasets)


class Untouched(Dataset[Any]):
    """Examples that nobody may look at."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("the training has begun")


@pytest.mark.parametrize(
    "training",
    [
        {"local_steps": 2},
        {"local_epochs": 1, "batch_size": 3},
        {"local_epochs": 2, "batch_size": 0},
    ],
)
def test_no_step_for_the_body_is_told_before_training_in_the_same_words(
    federate: Any, points: Any, training: dict[str, int]
) -> None:
    """By the config's numbers, by a client before it trains, and after an own loop."""
    run = RunSettings(1, local_steps=2)
    (problem,) = FedRepMethod(FedRepMethod.Params(head_steps=2)).problems(run)
    with pytest.raises(ConfigError) as refused:
        federate(FedRep(head_steps=2), network, [Untouched()] * 2, rounds=1, **training)
    assert problem.text in str(refused.value)

    model, data = network(), points(4, 1, shape=(3, 16, 16))
    rules = Hooks(model, {"hook": HeadThenBody({"classifier.weight"}, 2)})

    def own_loop() -> None:
        with rules._block():
            sgd = rules.wrap(torch.optim.SGD(model.parameters(), RATE))
            for _ in range(2):
                model(data.inputs).sum().backward()
                sgd.step()

    with pytest.raises(ConfigError) as refused:
        own_loop()
    assert str(refused.value) == problem.text
