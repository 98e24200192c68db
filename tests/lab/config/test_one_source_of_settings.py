"""A method's settings are declared once for Python, config and command line."""

from __future__ import annotations

import pytest

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config, method_of
from fedbn_flwr.lab.config.fields import (
    PARAMS,
    config_fields,
    methods_with,
    own_defaults,
    settings_of_methods,
)
from fedbn_flwr.server.methods.params import Params, setting
from fedbn_flwr.strategies import STRATEGIES
from tests.support.every_key import FEDWON


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_default_in_python_is_the_default_of_the_config(name: str) -> None:
    """Two Flower classes of the same name have another default. Configs keep ours."""
    config = Config.make({**{"fedwon": FEDWON}.get(name, {}), "strategy": name})
    kept = {
        "fedprox": {"proximal_mu": 0.01},
        "fedavgm": {"server_momentum": 0.9},
    }
    made = STRATEGIES[name](**kept.get(name, {}))
    assert method_of(config).params == made.params
    for key, name in config_fields(type(made.params)).items():
        assert getattr(config, key) == getattr(made.params, name), key


@pytest.mark.parametrize(
    ("strategy", "key"), [("fixbn", "freeze-at"), ("fedtan2", "fedtan-rounds")]
)
def test_a_round_and_a_share_that_are_equal_are_two_settings(
    strategy: str, key: str
) -> None:
    setting = key.replace("-", "_")
    for at in (1, 1.0, 0, 0.0, 1):
        config = Config.make({"strategy": strategy, key: at})
        params = method_of(config).params
        assert (
            repr(getattr(config, setting)) == repr(getattr(params, setting)) == repr(at)
        )


def test_a_default_of_the_methods_own_is_not_set_for_the_others() -> None:
    assert own_defaults() == {"server_learning_rate": 0.0, "agc": -1.0}
    own = {
        "fedavg": 0.0,
        "fedadam": 0.1,
        "fedyogi": 0.01,
        "fedavgm": 1.0,
        "scaffold": 1.0,
    }
    for name, rate in own.items():
        assert Config.make({"strategy": name}).server_learning_rate == rate, name
    set_ = Config.make({"strategy": "fedyogi", "server-learning-rate": 0.1})
    assert (set_.server_learning_rate, method_of(set_).params.eta) == (
        0.1,
        0.1,
    ), "Flower's name in Python"
    fedwon = {"strategy": "fedwon", "norm": "wsconv"}
    assert [
        Config.make({**fedwon, **own}).agc for own in ({}, {"agc": 0.0}, {"agc": 0.5})
    ] == [0.1, 0.0, 0.5]
    assert [Config.make(own).agc for own in ({}, {"agc": 0.5})] == [0.0, 0.5]
    with pytest.raises(ConfigError, match=r"eta=-1\.0: input should be greater than 0"):
        Config.make({"strategy": "fedadam", "server-learning-rate": -1.0})


def test_a_new_methods_parameter_is_a_key_without_more() -> None:
    class OtherParams(Params):
        cut: float = setting(
            0.2, "share of the replies that is cut off at each end", ge=0, lt=0.5
        )

    annotation, field = settings_of_methods({**PARAMS, "other": OtherParams})["cut"]
    assert (annotation, field.default, field.description) == (
        float,
        0.2,
        OtherParams.model_fields["cut"].description,
    )
    params = {"fedavg": Params, "other": OtherParams}
    assert methods_with("cut", params) == ["other"]
    assert methods_with("seed", params) == [], (
        "settings of every method are in no method's list"
    )
