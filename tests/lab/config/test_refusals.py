"""Each row of declared problems has a planted case with its code and key.

Each way to run refuses the same values.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from torch import nn

from fedbn_flwr import client_app
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.config.check_keys import defaults_of
from fedbn_flwr.lab.runs.check_start import check as check_start
from fedbn_flwr.legacy.legacy_strategy import LegacyStrategy
from fedbn_flwr.mods import bn_mod, bn_rules
from fedbn_flwr.privacy.protection_settings import (
    MASKED_UPDATES,
    DPSettings,
    MaskSettings,
)
from fedbn_flwr.problems import BEFORE_A_RUN, Known, Problem, check
from fedbn_flwr.server.methods.options import OPTIONS
from fedbn_flwr.server.methods.params import Params
from fedbn_flwr.strategies import METHODS, STRATEGIES
from fedbn_flwr.training import LearningRate, LocalTraining, make_optimizer
from tests.support.federation import torch_clients
from tests.support.their_client import TheirClient, numpy_clients

ROWS: dict[str, list[Problem]] = defaultdict(list)
for kind in (*METHODS.values(), *OPTIONS):
    for row in kind.rows:
        ROWS[row.code].append(row)
for row in (*Params.rows, *DPSettings.rows, MASKED_UPDATES):
    ROWS[row.code].append(row)


def test_a_code_has_one_sentence_and_names_keys_that_exist() -> None:
    keys = {key.replace("-", "_") for key in defaults_of(Config)}
    for code, rows in ROWS.items():
        assert len({(row.text, row.stage, row.effect) for row in rows}) == 1, code
        assert set(rows[0].keys.split()) <= keys, code
        assert set(rows[0].needs.split()) <= Known.__dataclass_fields__.keys(), code


CASES: Mapping[str, dict[str, Any]] = {
    "needs-sgd": {"strategy": "scaffold", "optimizer": "adam"},
    "needs-plain-sgd": {"strategy": "scaffold", "sgd-momentum": 0.9},
    "needs-no-momentum": {"strategy": "scaffold", "momentum-scope": "local"},
    "momentum-without-sgd": {"momentum-scope": "local", "optimizer": "adam"},
    "momentum-of-zero": {"momentum-scope": "local", "sgd-momentum": 0.0},
    "no-body-step": {"strategy": "fedrep", "head-steps": 3, "local-steps": 3},
    "long-window": {"strategy": "fixbn", "freeze-at": "auto", "freeze-window": 30},
    "frozen-from-the-start": {"strategy": "fixbn", "freeze-at": 0},
    "fedwon-norm": {"strategy": "fedwon", "norm": "group"},
    "no-proximal-term": {"strategy": "fedprox", "proximal-mu": 0.0},
    "models-alone": {"strategy": "ditto", "proximal-mu": 0.0},
    "no-server-step": {"strategy": "fedavgm", "server-momentum": 0.0},
    "two-noises": {"dp": "server", "dp-noise-multiplier": 1.0, "dp-target-epsilon": 1},
    "clients-clip": {"dp": "client", "dp-clipping": "adaptive"},
    "no-epsilon": {"dp": "server", "dp-delta": 1e-6},
    "masked-updates": {"masked-sums": True, "dp": "server", "eval-on": "global"},
}
"""A config for each row that a config can have."""
OF_A_MODEL = {
    "fedwon-has-batchnorm": nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)),
    "fedwon-no-convolution": nn.Sequential(nn.Linear(2, 2)),
}
IN_PYTHON = {"test-not-done"}


def test_each_row_before_a_run_has_a_planted_case() -> None:
    before = {code for code, rows in ROWS.items() if rows[0].stage in BEFORE_A_RUN}
    assert before == CASES.keys() | OF_A_MODEL.keys() | IN_PYTHON


@pytest.mark.parametrize("code", CASES)
def test_a_planted_case_is_told_with_its_subject(code: str) -> None:
    (row, *_) = ROWS[code]
    if row.effect == "warn":
        warned = Config.make(CASES[code]).warnings()
        method = METHODS[CASES[code]["strategy"]]
        expected = row.text.partition("{")[0] or row.text.rpartition("}")[2]
        assert any(expected in text for text in warned), method
        return
    with pytest.raises(ConfigError) as caught:
        Config.make(CASES[code])
    told = {(problem.code, problem.key) for problem in caught.value.problems}
    shown = "no-effect" if row.effect == "no-effect" else code
    assert (shown, row.key.replace("_", "-")) in told


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("fixbn", "freeze-at"),
        ("fedtan2", "fedtan-rounds"),
        ("fedbs", "fedbs-rounds"),
        ("fbn", "statistics-warm-up"),
        ("hbn", "statistics-warm-up"),
    ],
)
def test_a_phase_that_never_begins_is_warned_of(name: str, key: str) -> None:
    for rounds, expected in ((9, ["phase-never-begins"]), (10, [])):
        params = STRATEGIES[name](**{key.replace("-", "_"): 9}).methods
        found = params.problems(Known(num_rounds=rounds), ["run"])
        assert [problem.code for problem in found] == expected
        assert all(problem.key == key.replace("-", "_") for problem in found)


@pytest.mark.parametrize("code", OF_A_MODEL)
def test_a_model_that_does_not_fit_is_named(code: str) -> None:
    start = ArrayRecord(OF_A_MODEL[code].state_dict())
    with pytest.raises(ConfigError) as caught:
        STRATEGIES["fedwon"]().prepare(start, 3, 1)
    assert code in [problem.code for problem in caught.value.problems]


@pytest.mark.parametrize("test", ["global-test-bn", "personal-domains", "global-train"])
def test_a_test_that_only_the_laboratory_does_is_refused_in_a_project(
    test: str,
) -> None:
    strategy = STRATEGIES["fedavg"](eval_on=f"personal-own,{test}")
    with pytest.raises(ConfigError) as caught:
        strategy.prepare(ArrayRecord(model().state_dict()), 3, 1)
    (problem,) = caught.value.problems
    assert (problem.code, problem.key) == ("no-effect", "eval_on")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (DPSettings, {"dp_noise_multiplier": 1.0}),
        (DPSettings, {"dp_clipping_norm": 2.0}),
        (DPSettings, {"dp": "server", "dp_delta": 1e-6}),
        (MaskSettings, {"masked_threshold": 0.8}),
        (STRATEGIES["fedavg"], {"cohort_rounds": 3}),
        (STRATEGIES["fixbn"], {"freeze_window": 5}),
        (STRATEGIES["fedtan2"], {"freeze_tau": 0.1}),
        (STRATEGIES["feddna"], {"fedtan_bind": "127.0.0.1:5"}),
    ],
)
def test_a_setting_without_effect_is_refused_in_python(
    kind: Any, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**settings)
    (problem,) = caught.value.problems
    assert (problem.code, problem.key) == ("no-effect", [*settings][-1])


# --- all ways to run agree ------------------------------------------------------------
VALUES: Mapping[str, list[Any]] = {
    "layers": ["norm"],
    "variance": ["pooled"],
    "eval_on": ["global", "personal-own", "averaged-bn", "recalibrated"],
    "recalibrate": [True],
    "momentum_scope": ["local", "global"],
    "cohort_rounds": [3],
    "agc": [0.2],
    "proximal_mu": [0.1],
    "freeze_at": [0, 5, 1000, "auto"],
    "freeze_affine": [True],
    "freeze_window": [5],
    "freeze_tau": [0.1],
    "fedtan_bind": ["127.0.0.1:5"],
    "fedtan_rounds": [1, 1000, "auto"],
    "statistics_warm_up": [0, 1000],
    "fedbs_rounds": [1000],
    "head_steps": [0],
    "personal": ["last-layer"],
}
ONLY_OF_CLIENTS = {"optimizer", "sgd_momentum", "norm", "local_steps", "recorded"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def told(run: Any) -> set[tuple[str, str]]:
    """Return the code and the key of each refusal."""
    try:
        run()
    except ConfigError as error:
        return {(one.code, one.key.replace("_", "-")) for one in error.problems}
    return set()


def settings_of(name: str) -> Iterator[tuple[str, Any]]:
    for key, values in VALUES.items():
        if key in STRATEGIES[name].Params.model_fields:
            for value in values:
                yield key, value


# FedWon needs a model without BatchNorm.
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "fedwon"])
def test_config_strategy_and_legacy_loop_refuse_the_same_settings(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    unknown = {
        code
        for code, rows in ROWS.items()
        if set(rows[0].needs.split()) & ONLY_OF_CLIENTS
    }
    start = ArrayRecord(model().state_dict())
    for key, value in settings_of(name):
        config = {"strategy": name, key.replace("_", "-"): value}

        def in_python(legacy: bool, key: str = key, value: Any = value) -> None:
            strategy = STRATEGIES[name](**{key: "1" if key == "layers" else value})
            if legacy:
                LegacyStrategy(strategy, start, num_rounds=20)
            else:
                strategy.prepare(start, 20, 1)

        def of_config(config: dict[str, Any] = config) -> None:
            check_start(Config.make(config))

        found = {one for one in told(of_config) if one[0] not in unknown}
        assert found == told(lambda: in_python(legacy=False)), (key, value)
        if STRATEGIES[name]().methods.whole.exchanges is None:
            assert found == told(lambda: in_python(legacy=True)), (key, value)


class InALoop(TheirClient):
    """It takes the optimizer and the steps of ``training``, with the method's rules."""

    training: LocalTraining

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        self.set(parameters)
        with bn_rules(self.model, config, self.context) as rules:
            optimizer = rules.wrap(make_optimizer(self.model, self.training))
            for _ in range(self.training.num_steps(len(self.data))):
                self.model(self.data.inputs).sum().backward()
                optimizer.step()
        return self.state(), len(self.data), {}


KNOWN_BY_CLIENTS = {"optimizer", "sgd_momentum", "local_steps"}
"""Facts of training. Only the laboratory's server knows them: it has the config."""


@pytest.mark.parametrize("legacy", [False, True], ids=["message", "legacy"])
@pytest.mark.parametrize("loop", [False, True], ids=["TorchClient", "bn_rules"])
@pytest.mark.parametrize(
    "code",
    [code for code in CASES if {*ROWS[code][0].needs.split()} & KNOWN_BY_CLIENTS],
)
def test_clients_refuse_the_training_that_a_config_refuses(
    code: str,
    loop: bool,
    legacy: bool,
    points: Any,
    mlp: Any,
    run_strategy: Any,
    run_legacy_loop: Any,
) -> None:
    case = {key.replace("-", "_"): value for key, value in CASES[code].items()}
    kind = STRATEGIES[case.pop("strategy", "fedavg")]
    settings = {
        key: case.pop(key) for key in [*case] if key in kind.Params.model_fields
    }
    training = LocalTraining(learning_rate=LearningRate(0.1), **case)
    data = [points(6, i) for i in range(2)]
    client_fn: Any = torch_clients(mlp, data, training)
    if loop:
        client_fn = numpy_clients(mlp, data, InALoop, training=training)
    mods = [bn_mod] if loop else []
    app, run = client_app(client_fn, mods=mods), run_strategy
    if legacy:
        app = ClientApp(lambda context: client_fn(context).to_client(), mods=mods)
        run = run_legacy_loop
    with pytest.raises(ConfigError) as caught:
        run(kind(**settings), app, mlp().state_dict(), 2, rounds=1)
    assert caught.value.code == code


def test_a_row_whose_facts_are_unknown_is_skipped() -> None:
    method = METHODS["scaffold"](METHODS["scaffold"].Params())
    assert not [*check(method.rows, method, Known())]
    (problem,) = check(method.rows, method, Known(optimizer="adam"))
    assert problem.code == "needs-sgd"
