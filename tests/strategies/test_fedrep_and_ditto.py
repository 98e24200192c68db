"""Heads of FedRep, the own model of Ditto, and refusals of both."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from fedbn_flwr.client.hooks import Hooks
from fedbn_flwr.errors import ConfigError, FedBNError
from fedbn_flwr.problems import Known
from fedbn_flwr.strategies import (
    Ditto,
    FedBN,
    FedRep,
    FixBN,
    combined,
    ditto,
    refuse_on_client,
)
from fedbn_flwr.strategies.fedrep import HEAD_STEPS, HeadThenBody
from tests.support.user_loops import SIZES
from tests.support.written_out import (
    below,
    network,
)

RATE = 0.005


@pytest.fixture
def datasets(points: Any) -> list[Any]:
    """Return the images of three clients of different sizes."""
    return [points(n, i, shape=(3, 16, 16)) for i, n in enumerate(SIZES)]


def test_fedrep_with_fedbn_keeps_both_and_other_heads_by_their_names(
    federate: Any, datasets: Any
) -> None:
    strategy = combined(FedBN, FedRep)(head_steps=1, personal="classifier,*denseblock3")
    run = federate(strategy, network, datasets, rounds=1, rate=RATE)
    own = set(run.local_state(0))
    assert below(network(), "classifier.", "features.denseblock3.") < own
    assert "features.norm0.running_mean" in own


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
    """Examples whose use fails the test."""

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
    """The config, a client before training and a user's loop give one message."""
    (problem,) = FedRep(head_steps=2).methods.problems(Known(local_steps=2), ["run"])
    with pytest.raises(ConfigError) as refused:
        federate(FedRep(head_steps=2), network, [Untouched()] * 2, rounds=1, **training)
    assert problem.text in str(refused.value)

    model, data = network(), points(4, 1, shape=(3, 16, 16))
    refuse = functools.partial(refuse_on_client, ["head-then-body"], {HEAD_STEPS: 2})
    hooks = {"head-then-body": HeadThenBody({"classifier.weight"}, 2)}
    rules = Hooks(model, hooks, refuse)

    def own_loop() -> None:
        with rules._block():
            sgd = rules.wrap(torch.optim.SGD(model.parameters(), RATE))
            for _ in range(2):
                model(data.inputs).sum().backward()
                sgd.step()

    with pytest.raises(ConfigError) as refused:
        own_loop()
    assert str(refused.value) == problem.text
