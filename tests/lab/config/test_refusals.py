"""Each row of declared problems has a planted case with its code and key.

Each way to run refuses the same values.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from types import SimpleNamespace

import pytest
from doc_problems import CATEGORIES, FOUND, problem_rows
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from torch import nn

from fedbn_flwr import client_app
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config, method_of
from fedbn_flwr.lab.runs.check_start import checked_config
from fedbn_flwr.lab.studies.check_study import load_study
from fedbn_flwr.legacy.legacy_strategy import LegacyStrategy
from fedbn_flwr.mods import bn_mod, bn_rules
from fedbn_flwr.privacy.protection_settings import DPSettings
from fedbn_flwr.problems import Known, found_problems
from fedbn_flwr.server.methods.method import Facts, Node
from fedbn_flwr.server.methods.options import OPTIONS
from fedbn_flwr.server.methods.params import Params
from fedbn_flwr.server.methods.phases import BATCHNORM, TRACKED, Phase
from fedbn_flwr.strategies import METHODS, STRATEGIES
from fedbn_flwr.strategies.fixbn import Frozen
from fedbn_flwr.training import LearningRate, LocalTraining, make_optimizer
from tests.lab.config.test_problems import FIRST, FURTHER, problems
from tests.support.fast import thinned
from tests.support.federation import torch_clients
from tests.support.tables import write_images
from tests.support.their_client import TheirClient, numpy_clients

ROWS = defaultdict(list)
for kind in (*METHODS.values(), *OPTIONS, Params, DPSettings):
    for row in kind.checks:
        ROWS[row.code].append(row)


TABLE = defaultdict(list)
for found in problem_rows():
    if found.code not in CATEGORIES and found.stage != FOUND:
        TABLE[found.code].append(found)


CASES = {
    "needs-sgd": {"strategy": "scaffold", "optimizer": "adam"},
    "needs-plain-sgd": {"strategy": "scaffold", "sgd-momentum": 0.9},
    "needs-no-momentum": {"strategy": "scaffold", "momentum-scope": "local"},
    "tau-needs-sgd": {"strategy": "fednova", "optimizer": "adam"},
    "tau-of-one-round": {"strategy": "fednova", "momentum-scope": "local"},
    "momentum-without-sgd": {"momentum-scope": "local", "optimizer": "adam"},
    "momentum-of-zero": {"momentum-scope": "local", "sgd-momentum": 0.0},
    "no-body-step": {"strategy": "fedrep", "head-steps": 3, "local-steps": 3},
    "long-window": {"strategy": "fixbn", "freeze-at": "auto", "freeze-window": 30},
    "frozen-from-the-start": {"strategy": "fixbn", "freeze-at": 0},
    "fedwon-norm": {"strategy": "fedwon", "norm": "group"},
    "no-proximal-term": {"strategy": "fedprox", "proximal-mu": 0.0},
    "models-alone": {"strategy": "ditto", "proximal-mu": 0.0},
    "no-server-step": {"strategy": "fedavgm", "server-momentum": 0.0},
    "no-epsilon": {"dp": "server", "dp-delta": 1e-6},
    "all-layers": {"strategy": "fedtan", "layers": "norm1"},
    "no-client-tests": {"fine-tune": 3, "eval-on": "global"},
    "no-layers": {"layers": "norm1"},
    "no-variances": {"strategy": "fedbn", "variance": "pooled"},
    "unprotected-value": {"strategy": "scaffold", "dp": "server", "eval-on": "global"},
    "dp-stops-early": {"dp": "server", "early-stopping": 2, "validation-share": 0.2},
    "dp-reads-classes": {"dp": "server", "dataset": "folder:{folder}/own"},
    "relative-path": {"dataset": "mnist", "data-dir": "mnist"},
    "data-dir-missing": {"dataset": "mnist", "data-dir": "{folder}/none"},
    "state-dir-without-out": {"state-dir": "out"},
}
"""A config for each problem that a config can have, except those of test_problems.py.

``{folder}`` is a folder with own data.
"""
LINEAR = nn.Linear(2, 2)
OF_A_MODEL = {
    "fedwon-has-batchnorm": ("fedwon", {}, [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)]),
    "fedwon-no-convolution": ("fedwon", {}, [LINEAR]),
    "no-batchnorm": ("fedbn", {}, [LINEAR]),
    "batchnorm-lacks-entries": (
        "mtfl",
        {},
        [LINEAR, nn.BatchNorm1d(2, affine=False)],
    ),
    "nothing-shared": ("fedavg", {"personal": "*"}, [LINEAR]),
    "nothing-left-to-train": (
        "fixbn",
        {"freeze_at": 1, "freeze_affine": True},
        [nn.BatchNorm1d(2)],
    ),
    "personal-in-common": ("fixbn", {"personal": "1"}, [LINEAR, nn.BatchNorm1d(2)]),
    "tied-apart": ("fedavg", {"personal": "0"}, [LINEAR, LINEAR]),
    "unknown-weights": (
        "fedtan",
        {"weighted_by_key": "w"},
        [LINEAR, nn.BatchNorm1d(2)],
    ),
    "test-not-done": ("fedavg", {"eval_on": "global-train"}, [LINEAR]),
}
"""Strategy, settings and layers for each problem that ``Strategy.start`` can find."""
OF_A_STUDY = {
    "study-seed-unused": "methods: {A: {seed: 1}}",
    "study-lists-twice": "methods: {A: {}}\nseeds: [1, 1]",
    "study-name-unknown": "methods: {A: {}}\nskip: [B/all]",
    "study-skips-all": "methods: {A: {}}\nskip: [A/all]",
    "study-folder-shared": "methods: {a b: {}, a+b: {}, a/b: {}, a_b: {}}",
    "tune-without-validation": (
        "methods: {A: {}}\ntune: {grid: {learning-rate: [0.1]}}"
    ),
    "study-setting-unused": "methods: {A: {learning-rate: 0.1}}",
}
"""A study for each of its problems; the command sets ``learning-rate``."""


def of(name: str, **settings):
    """The method of a strategy, without its options."""
    *_, method = STRATEGIES[name](**settings).methods
    return method


def in_round(phase: Phase | None = None, **known) -> Known:
    """The second round of a run with a new model of two BatchNorm layers.

    It has two replies of clients that have trained for the first time.
    """
    new = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    state = {name: entry.numpy() for name, entry in new.state_dict().items()}
    facts = Facts(2, 3, split_state(new), state, phase or Phase())
    info = SimpleNamespace(began=True)
    reply = SimpleNamespace(extras={}, node=Node(1, 0, 3), info=info)
    return Known(number=2, facts=facts, replies=[reply] * 2, **known)


FROZEN = Frozen(frozen_after=1)
IN_A_ROUND = {
    "statistics-untouched": (
        of("fixbn", freeze_at=1),
        in_round(Phase(frozen=TRACKED), state=FROZEN),
    ),
    "trained-too-late": (
        of("fixbn", freeze_at=1, freeze_affine=True),
        in_round(Phase(local=BATCHNORM), state=FROZEN),
    ),
    "far-statistics": (of("fixbn"), in_round(state=FROZEN)),
    "large-mu": (of("fedprox", proximal_mu=0.1), in_round()),
    "large-server-steps": (of("fedadam"), in_round()),
    "large-steps-without-norm": (of("fedwon"), in_round()),
}
"""A method and the facts of a round for each problem of a round."""
ELSEWHERE = {
    "phase-never-begins": "below, for each method with phases",
    "legacy-loop-exchanges": "tests/legacy/test_legacy_strategy.py",
    "legacy-loop-re-estimates": "tests/legacy/test_legacy_strategy.py",
    "legacy-loop-train-only": "tests/strategies/test_train_only.py",
    "around-a-strategy": "tests/privacy/test_flowers_wrappers.py",
    "needs-minimization": "tests/strategies/test_scaffold.py",
    "counters-as-weights": "tests/privacy/test_flowers_wrappers.py",
    "other-norm": "tests/strategies/test_layers_by_names.py",
    "study-tests-differ": "tests/lab/studies/test_sweep.py",
    "stepped-buffers": "tests/strategies/test_server_optimizers.py",
    "unequal-weights": "tests/privacy/test_flowers_wrappers.py",
}


def test_each_problem_has_a_planted_case() -> None:
    planted = {*CASES, *OF_A_MODEL, *OF_A_STUDY, *IN_A_ROUND, *ELSEWHERE}
    assert planted <= TABLE.keys()
    planted |= {code for _, wanted in FIRST.values() for code, _ in wanted}
    planted |= {code for _, code, _ in FURTHER}
    assert TABLE.keys() - planted == set()


def of_code(code: str) -> set[tuple[str, str]]:
    """The code and the key that a user sees, for each row of the code."""
    rows = TABLE[code]
    if any(row.effect == "no-effect" for row in rows):
        code = "no-effect"
    return {(code, row.keys.partition(" ")[0].replace("_", "-")) for row in rows}


@pytest.mark.parametrize("code", CASES)
def test_a_planted_case_is_told_with_its_subject(code: str, tmp_path) -> None:
    write_images(tmp_path / "own", {"cat": 4, "dog": 4})
    settings = {
        key: value.format(folder=tmp_path) if isinstance(value, str) else value
        for key, value in CASES[code].items()
    }
    (row, *_) = TABLE[code]
    if row.effect == "warn":
        text = ROWS[code][0].text
        expected = text.partition("{")[0] or text.rpartition("}")[2]
        assert any(expected in one for one in Config.make(settings).warnings())
        return
    seen = told(lambda: checked_config(Config.make(settings)))
    assert any(one in seen or "{" in one[1] for one in of_code(code)), seen
    assert {one for one, _ in of_code(code)} <= {one for one, _ in seen}


@pytest.mark.parametrize("code", OF_A_STUDY)
def test_a_planted_case_of_a_study_is_told(code: str, tmp_path) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(f"name: small\n{OF_A_STUDY[code]}\n")
    given = ["learning-rate=0.2"] if code == "study-setting-unused" else []
    assert code in {one for one, _ in told(lambda: load_study(study, given))}


@pytest.mark.parametrize("code", IN_A_ROUND)
def test_a_planted_case_of_a_round_is_told(code: str) -> None:
    (row, *_) = TABLE[code]
    method, known = IN_A_ROUND[code]
    found = found_problems(method.checks, method, known, [row.stage])
    assert (code, row.effect) in [(one.code, one.effect) for one in found]
    # Before the first round of another method, nobody has the problem.
    plain = of("fedavg")
    assert not [*found_problems(plain.checks, plain, known, [row.stage])]


TEN = dict.fromkeys(
    ("num-server-rounds", "local-steps", "num-clients", "num-classes"), 10
)
DP = {"dp": "server", "strategy": "fedavg"}
EDGES = [
    ("phase-never-begins", {**TEN, "strategy": "fixbn"}, "freeze-at", [9], [10, 11]),
    ("phase-never-begins", {**TEN, "strategy": "fedtan2"}, "fedtan-rounds", [9], [10]),
    (
        "long-window",
        {**TEN, "strategy": "fixbn", "freeze-at": "auto"},
        "freeze-window",
        [9],
        [10],
    ),
    ("no-body-step", {**TEN, "strategy": "fedrep"}, "head-steps", [9], [10]),
    ("too-many-classes", {}, "classes-per-client", [10], [11]),
    ("too-many-classes", {"partition": "classes"}, "classes-per-client", [10], [11]),
    ("too-few-classes", {}, "num-classes", [0, 10, 11], [9]),
    ("two-lengths", {"local-steps": 2}, "local-epochs", [0], [1, 2]),
    ("decay-time", {}, "lr-decay-at", ["0", "0.0,1.0", "21"], ["-1", "1.01", "1,x"]),
    (
        "decay-factors",
        {"lr-decay-at": "1,2"},
        "lr-decay-factor",
        ["2", "0.1,0.2"],
        ["0", "0.1,0", "x", ".1,.1,.1"],
    ),
    (
        "unprotected-report",
        DP,
        "eval-on",
        ["global"],
        ["global,global-train", "global,personal-own"],
    ),
    ("unprotected-report", DP, "validation-share", [0.0], [0.1]),
    ("no-effect", {"held-out-clients": 1}, "test-bn", ["mix"], []),
    ("no-effect", {"eval-on": "global-test-bn"}, "test-bn", ["mix"], []),
]
"""Problem, settings, key, its nearest values without the problem, and with it."""


@pytest.mark.parametrize(("code", "settings", "key", "good", "bad"), EDGES)
def test_a_problem_begins_exactly_at_its_limit(
    code: str, settings, key: str, good, bad
) -> None:
    for value in (*good, *bad):
        try:
            warned = method_of(Config.make({**settings, key: value})).problems
            found = {one.code for one in warned if one.effect == "warn"}
        except ConfigError as error:
            found = {error.code, *(one.code for one in error.problems)}
        assert (code in found) == (value in bad), value


@pytest.mark.parametrize("legacy", [False, True], ids=["message", "legacy"])
@pytest.mark.parametrize("code", OF_A_MODEL)
def test_a_model_that_does_not_fit_is_named(code: str, legacy: bool) -> None:
    name, settings, layers = OF_A_MODEL[code]
    network = nn.Sequential(*layers)
    start = ArrayRecord(network.state_dict())

    def run() -> None:
        # Only a split of the model has its tied entries.
        parts = split_state(network) if code == "tied-apart" else None
        strategy = STRATEGIES[name](**settings, parts=parts)
        if legacy and not strategy.methods.all_phases.exchanges:
            LegacyStrategy(strategy, start, num_rounds=3)
        else:
            strategy.prepare(start, 3, 1)

    assert of_code(code) <= told(run)


@pytest.mark.parametrize("test", ["global-test-bn", "personal-domains", "global-train"])
def test_a_test_that_only_the_laboratory_does_is_refused_in_a_project(
    test: str,
) -> None:
    strategy = STRATEGIES["fedavg"](eval_on=f"personal-own,{test}")
    start = ArrayRecord(model().state_dict())
    assert problems(strategy.prepare, start, 3, 1) == [("no-effect", "eval_on")]


# --- all ways to run agree ------------------------------------------------------------
VALUES = {
    "layers": ["norm"],
    "variance": ["pooled"],
    "eval_on": ["global", "personal-own", "averaged-bn", "recalibrated"],
    "recalibrate": [True],
    "momentum_scope": ["local", "global"],
    "agc": [0.2],
    "proximal_mu": [0.1],
    "freeze_at": [0, 5, 1000, "auto"],
    "freeze_affine": [True],
    "freeze_window": [5],
    "freeze_tau": [0.1],
    "fedtan_bind": ["127.0.0.1:5"],
    "fedtan_rounds": [1, 1000, "auto"],
    "head_steps": [0],
    "personal": ["last-layer"],
}
ONLY_OF_CLIENTS = {"optimizer", "sgd_momentum", "norm", "local_steps", "recorded"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def needs(code: str) -> set[str]:
    """Return the facts without which a problem cannot be found."""
    return {*ROWS[code][0].needs.split()}


def told(run, *setting) -> set[tuple[str, str]]:
    """Return the code and the key of each refusal."""
    return {(code, key.replace("_", "-")) for code, key in problems(run, *setting)}


# FedWon needs a model without BatchNorm.
@pytest.mark.parametrize("name", thinned(sorted({*STRATEGIES} - {"fedwon"})))
def test_config_strategy_and_legacy_loop_refuse_the_same_settings(
    name: str, caplog
) -> None:
    caplog.set_level(logging.ERROR)
    unknown = {code for code in ROWS if needs(code) & ONLY_OF_CLIENTS}
    known = VALUES.keys() & STRATEGIES[name].Params.model_fields
    settings = [(key, value) for key in known for value in VALUES[key]]
    start = ArrayRecord(model().state_dict())

    def of_config(key: str, value) -> None:
        checked_config(Config.make({"strategy": name, key.replace("_", "-"): value}))

    def made(key: str, value):
        return STRATEGIES[name](**{key: "1" if key == "layers" else value})

    def of_strategy(*setting) -> None:
        made(*setting).prepare(start, 20, 1)

    def of_legacy(*setting) -> None:
        LegacyStrategy(made(*setting), start, num_rounds=20)

    for setting in settings:
        found = {one for one in told(of_config, *setting) if one[0] not in unknown}
        assert found == told(of_strategy, *setting), setting
        # The legacy loop has refusals of its own, before those of the strategy.
        in_legacy = told(of_legacy, *setting)
        if not any(code.startswith("legacy-loop") for code, _ in in_legacy):
            assert found == in_legacy, setting


KNOWN_BY_CLIENTS = {"optimizer", "sgd_momentum", "local_steps"}
"""Facts of training. Only the laboratory's server knows them: it has the config."""


class InALoop(TheirClient):
    """It takes the optimizer and the steps of ``training``, with the method's rules."""

    training: LocalTraining

    def fit(self, parameters: list, config: dict):
        self.set(parameters)
        with bn_rules(self.model, config, self.context) as rules:
            optimizer = rules.wrap(make_optimizer(self.model, self.training))
            for _ in range(self.training.num_steps(len(self.data))):
                self.model(self.data.inputs).sum().backward()
                optimizer.step()
        return self.state(), len(self.data), {}


@pytest.mark.parametrize("legacy", [False, True], ids=["message", "legacy"])
@pytest.mark.parametrize("loop", [False, True], ids=["TorchClient", "bn_rules"])
@pytest.mark.parametrize(
    "code", [code for code in ROWS if needs(code) & KNOWN_BY_CLIENTS]
)
def test_clients_refuse_the_training_that_a_config_refuses(
    code: str,
    loop: bool,
    legacy: bool,
    points,
    mlp,
    run_strategy,
    run_legacy_loop,
) -> None:
    case = {key.replace("-", "_"): value for key, value in CASES[code].items()}
    kind = STRATEGIES[case.pop("strategy", "fedavg")]
    settings = {
        key: case.pop(key) for key in [*case] if key in kind.Params.model_fields
    }
    if code == "no-body-step":
        settings["personal"] = "0"  # the layers of this model have no names
    training = LocalTraining(learning_rate=LearningRate(0.1), **case)
    data = [points(6, i) for i in range(2)]
    client_fn = torch_clients(mlp, data, training)
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
    assert not [*found_problems(method.checks, method, Known())]
    (problem,) = found_problems(method.checks, method, Known(optimizer="adam"))
    assert problem.code == "needs-sgd"
