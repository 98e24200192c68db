"""Every way to cross methods, models, clients, training and ways to run, against one
slow federation in plain torch.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from fedbn_flwr.server.methods.params import Params
from fedbn_flwr.strategies import STRATEGIES
from tests.reference.compare import check
from tests.reference.draws import Case, cases
from tests.reference.methods import REFERENCES
from tests.reference.package import SETTINGS

DRAWS = 425
"""Draws of each half; ``make laws`` has any number of others."""
fixed = settings(
    max_examples=DRAWS,
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.xdist_group("reference-1")
@fixed
@given(cases())
def test_the_package_equals_the_reference(case: Case) -> None:
    """Every entry, dtype, shape, kept state and client's test; refusals are foretold."""
    check(case)


@pytest.mark.xdist_group("reference-2")
@fixed
@given(cases())
def test_the_package_equals_the_reference_in_other_draws(case: Case) -> None:
    """The second half, for the second core."""
    check(case)


def test_each_strategy_has_a_reference() -> None:
    assert REFERENCES.keys() == STRATEGIES.keys()


NOT_DRAWN = {
    "seed": "of the draw of clients; batches have the clients' own",
    "cohort_rounds": "tests/server/test_nodes.py",
    "on_divergence": "tests/server/test_failures.py",
    "loss_key": "a metric of the user's",
    "fedtan_timeout": "tests/transport",
    "fedtan_bind": "an address",
    "fedtan_address": "an address",
    "fedtan_tls_dir": "a folder",
    "freeze_window": "tests/strategies/test_fixbn.py",
    "freeze_tau": "tests/strategies/test_fixbn.py",
}
"""The settings that no draw has, each with the reason or the place of its law."""


def test_each_setting_is_drawn_or_has_a_reason() -> None:
    drawn = {field.name for field in dataclasses.fields(Case)}
    drawn |= {name for values in SETTINGS.values() for name in values}
    drawn |= {"fedtan_exchanges", "fedtan_transport"}
    known = {*Params.model_fields}
    for strategy in STRATEGIES.values():
        known |= {*strategy.Params.model_fields}
    assert known - drawn == {*NOT_DRAWN} - drawn
    assert NOT_DRAWN.keys() <= known
