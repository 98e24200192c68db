"""Settings that no method accepts.

They are out of range or contradict another setting. Errors name both settings.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.problems import Known
from fedbn_flwr.strategies import STRATEGIES, FixBN

NAN, INFINITE = float("nan"), float("inf")
OUT_OF_RANGE = {
    "fedavg": {
        "variance": ["poled"],
        "min_replies": [0],
        "eval_every": [0],
        "eval_on": ["average-bn"],
        "fraction_train": ["0.5", 1.5],
    },
    "fixbn": {
        "freeze_at": ["later", 1.5, NAN, -1],
        "freeze_window": [1],
        "freeze_tau": [0.0],
    },
    "fedtan2": {
        "fedtan_rounds": ["later", 1.5, -1],
        "freeze_window": [1],
        "freeze_tau": [0.0],
        "fedtan_timeout": [-1.0],
    },
    "fedtan": {
        "fedtan_timeout": [0.0, NAN],
        "fedtan_exchanges": ["4L+1"],
        "fedtan_transport": ["chanel"],
    },
    "fedbs": {"fedbs_eps": [-0.1], "fedbs_rounds": [0], "proximal_mu": [-1.0]},
    "fedprox": {"proximal_mu": [NAN, INFINITE]},
    "fedwon": {"agc": [-0.1, NAN]},
    "hbn": {"statistics_momentum": [0.0], "statistics_warm_up": [-1]},
    "scaffold": {"server_learning_rate": [0.0, -1.0, NAN]},
    "fedavgm": {"server_momentum": [1.0, NAN], "server_learning_rate": [0.0]},
    "fedadagrad": {"eta": [INFINITE]},
    "fedadam": {"eta": [-1.0], "tau": [0.0]},
    "fedyogi": {"beta_1": [1.0], "beta_2": [-0.1]},
}
CASES = [
    (method, key, value)
    for method, keys in OUT_OF_RANGE.items()
    for key, values in keys.items()
    for value in values
]


@pytest.mark.parametrize(("method", "key", "value"), CASES)
def test_a_setting_out_of_its_range_is_refused_by_name(
    method: str, key: str, value
) -> None:
    with pytest.raises(ConfigError, match=key) as error:
        STRATEGIES[method](**{key: value})
    assert str(value) in str(error.value)
    assert error.value.code in ("bad-value", "config")


DP = {"dp": "server"}
# tests/lab/config has the other conflicts, by code and key.
CONTRADICTORY = [
    ({**DP, "eval-on": "global,global-train"}, "eval-on=global-train"),
    ({**DP, "strategy": "fedbn"}, "eval-on=personal-own"),
    ({**DP, "held-out-clients": "1"}, "held-out-clients"),
    ({**DP, "validation-share": 0.2}, "validation-share"),
    ({**DP, "dp-noise-multiplier": -1.0}, "dp-noise-multiplier=-1.0"),
]


@pytest.mark.parametrize(("settings", "names"), CONTRADICTORY)
def test_settings_that_do_not_fit_together_are_refused_by_name(
    settings: dict[str, Any], names: str
) -> None:
    with pytest.raises(ConfigError, match=names):
        Config.make(settings)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_setting_that_switches_a_method_off_is_warned_of(name: str) -> None:
    """Flower's default may be such a setting, but a config's default never is."""
    off = {"fedprox": "no-proximal-term", "fedavgm": "no-server-step"}
    of_zero = {**off, "ditto": "models-alone"}

    def warnings(**settings: Any) -> list[str]:
        problems = STRATEGIES[name](**settings).methods.problems(Known(num_rounds=20))
        return [problem.code for problem in problems if problem.effect == "warn"]

    assert warnings() == ([off[name]] if name in off else [])
    if name not in of_zero:
        return
    field = "server_momentum" if name == "fedavgm" else "proximal_mu"
    assert warnings(**{field: 0.0}) == [of_zero[name]]
    fields = STRATEGIES[name].Params.model_fields
    assert not warnings(**{field: fields[field].json_schema_extra["in_config"]})


@pytest.mark.parametrize("value", [np.int64(1), np.float64(0.5), np.int32(0)])
def test_a_number_of_numpy_is_the_number_of_python(value) -> None:
    at = FixBN(freeze_at=value).methods.params.freeze_at
    assert (type(at), at) == (type(value.item()), value)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_reason_names_only_settings_of_the_strategy(name: str) -> None:
    params = STRATEGIES[name]().methods.params
    known = {field.replace("_", "-") for field in type(params).model_fields}
    for problem in params.unused():
        assert {*re.findall(r"([a-z][a-z0-9-]+)=", problem.text)} <= known
