"""Heads of FedRep, the own model of Ditto, and refusals of both."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from fedbn_flwr.errors import FedBNError
from fedbn_flwr.strategies import (
    Ditto,
    FedBN,
    FedRep,
    combined,
    ditto,
)
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
    "no such head": lambda f, d: f(FedRep(personal="head"), network, d, rounds=1),
    "no parameter in the head": lambda f, d: f(
        FedRep(personal="*running_mean"), network, d, rounds=1
    ),
}


@pytest.mark.parametrize("run", WRONG.values(), ids=list(WRONG))
def test_what_does_not_fit_is_refused(federate: Any, datasets: Any, run: Any) -> None:
    with pytest.raises(FedBNError):
        run(federate, datasets)
