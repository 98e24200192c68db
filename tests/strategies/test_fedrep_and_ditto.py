"""Heads of FedRep, the own model of Ditto, and refusals of both."""

from __future__ import annotations

from typing import Any

import pytest

from fedbn_flwr.errors import FedBNError
from fedbn_flwr.strategies import (
    FedBN,
    FedRep,
    combined,
)
from tests.support.user_loops import SIZES
from tests.support.written_out import (
    below,
    network,
)

RATE = 0.005


@pytest.fixture
def datasets(points) -> list[Any]:
    """Return the images of three clients of different sizes."""
    return [points(n, i, shape=(3, 16, 16)) for i, n in enumerate(SIZES)]


def test_fedrep_with_fedbn_keeps_both_and_other_heads_by_their_names(
    federate, datasets
) -> None:
    strategy = combined(FedBN, FedRep)(head_steps=1, personal="classifier,*denseblock3")
    run = federate(strategy, network, datasets, rounds=1, rate=RATE)
    own = set(run.local_state(0))
    assert below(network(), "classifier.", "features.denseblock3.") < own
    assert "features.norm0.running_mean" in own


def test_a_head_without_parameters_is_refused(federate, datasets) -> None:
    with pytest.raises(FedBNError):
        federate(FedRep(personal="*running_mean"), network, datasets, rounds=1)
