"""A constructor is made from the settings of its method, and shows them.

Flower's arguments have Flower's places and defaults. A method's arguments have the
defaults of its ``Params``.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import flwr.server.strategy as legacy
import flwr.serverapp.strategy as flower
import pytest
from flwr.app import ArrayRecord

from fedbn_flwr import LegacyStrategy, strategies, to_legacy
from fedbn_flwr.compat.flower import LEGACY_NAMES
from fedbn_flwr.server.methods.params import Params, setting
from fedbn_flwr.strategies import (
    STRATEGIES,
    FedBN,
    Method,
    Strategy,
    combined,
)
from tests.support.checkout import ROOT

FLOWERS = ["FedAvg", "FedProx", "FedAvgM", "FedAdam", "FedYogi", "FedAdagrad"]


def defaults(kind: type) -> dict[str, Any]:
    """Return the default of each argument that the constructor names, in order."""
    parameters = inspect.signature(kind).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


OTHERS = {
    "parts": None,
    "on_round_end": None,
    "on_replies": None,
    "completes_tests": True,
    "num_partitions": None,
    "methods": None,
}
"""The arguments that are neither Flower's nor settings."""


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_constructor_shows_flowers_arguments_and_the_settings(name: str) -> None:
    kind = STRATEGIES[name]
    shown, flowers = defaults(kind), defaults(flower.FedAvg)
    assert list(shown.items())[: len(flowers)] == list(flowers.items())
    fields = {key: field.default for key, field in kind.Params.model_fields.items()}
    assert shown == flowers | fields | OTHERS
    assert kind().params == kind(**shown).params


@pytest.mark.parametrize("name", FLOWERS)
def test_a_class_with_a_name_of_flowers_has_its_arguments_and_defaults(
    name: str,
) -> None:
    """A changed import therefore changes only the results of BatchNorm."""
    ours = defaults(getattr(strategies, name))
    theirs = defaults(getattr(flower, name))
    theirs.pop("eta_l", None)  # the clients use the rate of their own training
    assert {argument: ours[argument] for argument in theirs} == theirs
    assert getattr(strategies, name)(**theirs).min_available_nodes == 2


def test_each_name_of_flowers_legacy_strategies_has_an_error_with_the_new_name() -> (
    None
):
    theirs = defaults(legacy.FedAvg)
    theirs.pop("fraction_evaluate")
    assert theirs.keys() == LEGACY_NAMES.keys()
    rows = (ROOT / "docs/flower-projects.md").read_text().splitlines()
    table = {row.split("`")[1]: row for row in rows if row.startswith("| `")}
    of_start = inspect.signature(Strategy.start).parameters
    for name, new in LEGACY_NAMES.items():
        with pytest.raises(TypeError, match=re.escape(new)):
            FedBN(**{name: None})
        first = re.split(r"\W", new)[0]
        assert first in table.get(name, "accept_failures nothing inplace"), name
        assert {*of_start, "start", "nothing", *defaults(FedBN)} >= {first}
        if name not in inspect.signature(LegacyStrategy).parameters:
            with pytest.raises(TypeError, match=re.escape(new)):
                to_legacy(FedBN(), ArrayRecord(), **{name: None})


class CarefulParams(Params):
    """Give a setting of every method another default."""

    min_replies: int = setting(3, "", ge=1)


class CarefulMethod(Method[CarefulParams]):
    """A user's method with that default."""

    name = "careful"
    role = "server-step"
    Params = CarefulParams


class Careful(Strategy):
    """A strategy without a constructor of its own."""

    method = CarefulMethod


def test_a_methods_own_default_of_a_common_setting_holds() -> None:
    """The default applies to the class, a subclass and a combination.

    An explicit value overrides the default.
    """
    for kind in (Careful, type("Mine", (Careful,), {}), combined(Careful, FedBN)):
        assert kind().params.min_replies == 3
        assert kind(min_replies=1).params.min_replies == 1
    assert defaults(Careful)["min_replies"] == 3
