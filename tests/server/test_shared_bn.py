"""The average of local BN parts, compared with a slow reference.

Other tests show the clients that are tested with the average.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from fedbn_flwr.client import TorchClient
from fedbn_flwr.strategies import (
    FedAvg,
    FedBN,
    Standalone,
)

SIZES = (6, 13, 9, 5)
AVERAGED = "averaged-bn"


@pytest.mark.parametrize(
    ("make", "untrained"),
    [
        (functools.partial(FedBN, eval_on=AVERAGED), 0),
        (FedBN, 5),
        (Standalone, 9),
        (FedAvg, 0),
    ],
)
def test_entries_without_training_are_told_to_the_users_own_test(
    federate_mlp, caplog, make, untrained
) -> None:
    """``evaluate_fn`` and the final arrays once silently had initial BN values."""
    federate_mlp(make(), rounds=1)
    told = [text for text in caplog.messages if "initial values" in text]
    assert len(told) == bool(untrained)
    for text in told:
        assert f"keeps {untrained} of the model's entries" in text
        # Standalone has no global model that an average could complete.
        assert ("eval_on='averaged-bn'" in text) == (untrained == 5)


def test_an_average_that_no_client_shared_is_named(federate_mlp, mlp, caplog) -> None:
    class Reserved(TorchClient):
        def fit(self, parameters, config):
            return super().fit(parameters, {**config, "fedbn-flwr.hooks": "[]"})

    run = federate_mlp(FedBN(eval_on=AVERAGED), rounds=2, client=Reserved)
    start = mlp().state_dict()["1.running_mean"].numpy()
    assert np.array_equal(run.history[-1]["1.running_mean"], start)
    said = [
        text for text in caplog.messages if "no client has shared its BN parts" in text
    ]
    assert len(said) == 3, "of each round, and of the result"
    assert "inside `with bn_rules(...)`" in said[-1]
