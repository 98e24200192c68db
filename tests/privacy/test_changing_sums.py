"""The server can solve single clients from sums over changing clients.

A warning reports this, and ``cohort_rounds`` keeps the clients the same.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from fedbn_flwr.strategies import FedAvg, Strategy
from tests.support.protected import masked

SIZES = (5, 6, 7, 5, 6, 8)
ROUNDS = 12


def members(strategy: Strategy) -> list[list[int]]:
    return [list(report.participants) for report in strategy.reports]


def trained(
    federate: Any, mlp: Any, datasets: Any, cohort_rounds: int, **options: Any
) -> list[list[int]]:
    strategy = FedAvg(
        fraction_train=0.67, fraction_evaluate=0.0, cohort_rounds=cohort_rounds
    )
    federate(strategy, mlp, datasets, local_steps=1, **{"rounds": ROUNDS, **options})
    return members(strategy)


@pytest.mark.parametrize(("cohort_rounds", "equations"), [(1, 6), (4, 3), (ROUNDS, 1)])
def test_the_server_solves_single_clients_from_sums_unless_the_clients_stay(
    federate, mlp, datasets, cohort_rounds, equations
) -> None:
    """The constant x of each client follows by least squares from the sums.

    Each round gives the sum over its clients.
    """
    sets = trained(federate, mlp, datasets, cohort_rounds)
    assert {len(each) for each in sets} == {4}
    assert all(sets[i] == sets[i - i % cohort_rounds] for i in range(ROUNDS))
    takes_part = np.array(
        [[client in each for client in range(6)] for each in sets], float
    )
    assert np.linalg.matrix_rank(takes_part) == equations
    x = np.random.default_rng(0).normal(size=6)
    found = np.linalg.lstsq(takes_part, takes_part @ x, rcond=None)[0]
    if equations == 6:
        np.testing.assert_allclose(found, x, atol=1e-9)
    if equations == 1:
        np.testing.assert_allclose(found[sets[0]], x[sets[0]].mean(), atol=1e-9)


def test_of_a_cohort_the_others_stay_where_a_client_is_lost(
    federate, mlp, datasets
) -> None:
    whole = trained(federate, mlp, datasets, 3, rounds=3)
    assert whole[0] == whole[1] == whole[2]
    inside, outside = whole[0][1], min(set(range(6)) - set(whole[0]))
    without = trained(federate, mlp, datasets, 3, rounds=3, hide={2: [inside]})
    assert without[0] == without[2] == whole[0]
    assert set(without[1]) > set(whole[0]) - {inside}
    assert len(without[1]) == 4
    assert trained(federate, mlp, datasets, 3, rounds=3, hide={2: [outside]}) == whole


@pytest.mark.parametrize(
    ("fraction", "cohort_rounds", "warns"),
    [(0.67, 1, True), (0.67, 2, True), (0.67, 3, False), (1.0, 1, False)],
)
def test_a_warning_comes_before_the_first_training(
    federate, mlp, datasets, caplog, fraction, cohort_rounds, warns
) -> None:
    strategy = masked(
        FedAvg(
            fraction_train=fraction, fraction_evaluate=0.0, cohort_rounds=cohort_rounds
        )
    )
    caplog.set_level(logging.INFO, logger="flwr")
    federate(strategy, mlp, datasets, rounds=3, local_steps=1)
    said = [record.getMessage() for record in caplog.records]
    found = [at for at, text in enumerate(said) if "cohort-rounds=3" in text]
    assert len(found) == int(warns)
    if warns:
        assert found[0] < next(at for at, text in enumerate(said) if "[ROUND 2" in text)
