"""One validator reports all problems of a config together.

Each problem has its code and key. Most of them are found without torch.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import CENTRALIZED, GROUPS, Config
from fedbn_flwr.lab.config.check_config import checked_keys
from fedbn_flwr.lab.config.fields import defaults_of, only_if_of
from fedbn_flwr.problems import raise_or_warn
from fedbn_flwr.server.methods.params import SET
from fedbn_flwr.strategies import METHODS
from tests.support.fast import thinned

KEYS = [key for group in GROUPS for key in Config.keys(group)]


def problems(check: Callable, *given) -> list[tuple[str, str]]:
    """Return the code and the key of each problem of a call."""
    text, found = "", ()
    try:
        check(*given)
    except ConfigError as error:
        text, found = str(error), error.problems
    assert all(f"[{problem.code}]" in text for problem in found)
    return [(problem.code, problem.key) for problem in found]


def test_each_key_is_in_one_group() -> None:
    assert len(KEYS) == len(set(KEYS))
    assert set(KEYS) == set(defaults_of(Config))


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("lr", "'learning-rate'"),
        ("rounds", "'num-server-rounds'"),
        ("num-server-rounds", "num-server-rounds=2.5 is not a whole number"),
    ],
)
def test_a_short_name_and_half_a_round_name_the_right_setting(
    key: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Config.make({key: 2.5})


# Problems found without torch: single keys, names, combinations of keys, and keys
# without effect, all together.
FIRST = {
    "an unknown key": ({"sed": 1}, [("unknown-key", "sed")]),
    "a key that is no text": ({3: 1}, [("unknown-key", "3")]),
    "a wrong type": ({"batch-size": "x"}, [("bad-value", "batch-size")]),
    "out of range": (
        {"batch-size": -1, "learning-rate": 0},
        [("bad-value", "batch-size"), ("bad-value", "learning-rate")],
    ),
    "a bool": ({"seed": True}, [("bad-value", "seed")]),
    "not finite": ({"learning-rate": float("inf")}, [("bad-value", "learning-rate")]),
    "a round that is none": (
        {"strategy": "fixbn", "freeze-at": "x"},
        [("bad-value", "freeze-at")],
    ),
    "names": (
        {
            "strategy": "fedbnn",
            "norm": "bach",
            "dataset": "x",
            "partition": "x",
            "eval-on": "x",
            "task": "x",
        },
        [
            ("unknown-name", key)
            for key in ("strategy", "norm", "dataset", "partition", "task", "eval-on")
        ],
    ),
    "a method misspelt, and its key": (
        {"strategy": "fixbnn", "freeze-at": 5},
        [("unknown-name", "strategy")],
    ),
    "two lengths": (
        {"local-steps": 3, "local-epochs": 2},
        [("two-lengths", "local-steps")],
    ),
    "no length": ({"local-epochs": 0}, [("no-local-step", "local-steps")]),
    "a decay": ({"lr-decay-at": "5,x"}, [("decay-time", "lr-decay-at")]),
    "what stopping needs": (
        {"early-stopping": 2, "checkpoint-every": 0},
        [
            ("early-stopping-without-checkpoint", "early-stopping"),
            ("early-stopping-without-validation", "early-stopping"),
        ],
    ),
    "another method's key": ({"proximal-mu": 0.1}, [("no-effect", "proximal-mu")]),
    "all kinds": (
        {
            "sed": 1,
            "batch-size": "x",
            "norm": "bach",
            "early-stopping": 2,
            "proximal-mu": 0.1,
        },
        [
            ("unknown-key", "sed"),
            ("bad-value", "batch-size"),
            ("unknown-name", "norm"),
            ("early-stopping-without-validation", "early-stopping"),
            ("no-effect", "proximal-mu"),
        ],
    ),
    "one client": (
        {"strategy": CENTRALIZED, "variance": "pooled", "fraction-train": 0.5},
        [("no-effect", "fraction-train"), ("no-effect", "variance")],
    ),
    "a setting of the method": (
        {"strategy": "fixbn", "freeze-window": 5},
        [("no-effect", "freeze-window")],
    ),
    "delta without noise": (
        {"dp": "server", "dp-delta": 1e-6},
        [("no-effect", "dp-delta")],
    ),
}


@pytest.mark.parametrize("case", FIRST)
def test_what_is_told_without_torch_is_told_by_make_too(case: str) -> None:
    settings, want = FIRST[case]
    for check in (check_keys, Config.make):
        assert sorted(problems(check, settings)) == sorted(want)


# Problems found by the keys, the registries, the data and the methods.
FURTHER = [
    ({"model": "x"}, "unknown-name", "model"),
    ({"num-classes": 5}, "too-few-classes", "num-classes"),
    ({"classes-per-client": 50}, "too-many-classes", "classes-per-client"),
    ({"task": "regression"}, "task-of-labels", "task"),
    ({"augment": "x"}, "config", "augment"),
    ({"dp": "server", "eval-on": "personal-own"}, "unprotected-report", "dp"),
    ({"lr-decay-at": "freeze"}, "no-effect", "lr-decay-at"),
    ({"model": "lenet", "image-size": 20}, "no-effect", "image-size"),
    ({"test-bn": "mix"}, "no-effect", "test-bn"),
    ({"strategy": "fedtan", "fedtan-bind": "0.0.0.0:9"}, "no-effect", "fedtan-bind"),
    ({"strategy": CENTRALIZED, "lr-decay-at": "3,freeze"}, "no-effect", "lr-decay-at"),
    (
        {"strategy": "fedrep", "head-steps": 5, "local-epochs": 5, "batch-size": 0},
        "no-body-step",
        "head-steps",
    ),
    ({"local_steps": 3}, "unknown-key", "local_steps"),
    *(
        ({"freeze-at": value}, "bad-value", "freeze-at")
        for value in (-1, 1.5, "half", False)
    ),
    ({"variance": "mode"}, "bad-value", "variance"),
    ({"eval-on": "global,own"}, "unknown-name", "eval-on"),
    ({"eval-on": ["global"]}, "bad-value", "eval-on"),
    ({"data-dir": None}, "bad-value", "data-dir"),
    ({"strategy": "fedbn", "eval-on": "recalibrated"}, "no-global-weights", "eval-on"),
    ({"strategy": "mtfl", "eval-on": "recalibrated"}, "no-global-weights", "eval-on"),
    (
        {"strategy": "fedavg", "eval-on": "averaged-bn"},
        "no-local-batchnorm",
        "eval-on",
    ),
    (
        {"strategy": "standalone", "eval-on": "personal-own,global"},
        "no-global-model",
        "eval-on",
    ),
    (
        {"strategy": "standalone", "eval-on": "personal-own,averaged-bn"},
        "no-local-batchnorm",
        "eval-on",
    ),
    (
        {"early-stopping": 2, "validation-share": 0.2, "class-moments": True},
        "early-stopping-with-class-moments",
        "class-moments",
    ),
    ({"norm": "batch-renorm"}, "unknown-name", "norm"),
    ({"eval-on": "personal-domains"}, "no-main-metric", "eval-on"),
    ({"eval-on": "global-train,global"}, "no-main-metric", "eval-on"),
    ({"eval-on": "global-test-bn"}, "test-without-test-bn", "test-bn"),
    (
        {"test-bn": "mix", "eval-on": "global-test-bn", "norm": "group"},
        "no-effect",
        "test-bn",
    ),
    (
        {"test-bn": "mix", "eval-on": "averaged-bn-test-bn"},
        "no-local-batchnorm",
        "eval-on",
    ),
    ({"test-bn": "mixed"}, "bad-value", "test-bn"),
    ({"task": "binary"}, "task-of-labels", "task"),
    ({"task": "binery"}, "unknown-name", "task"),
    ({"metrics": "mae,auroc,miou"}, "metric-of-task", "task"),
    *(
        (
            {"lr-decay-at": "1,2,3", "lr-decay-factor": factor},
            "decay-factors",
            "lr-decay-at",
        )
        for factor in ("0.1,0.2", "", "-1", "0", "x")
    ),
]


@pytest.mark.parametrize(("settings", "code", "key"), FURTHER, ids=str)
def test_a_problem_has_its_code_and_its_key(settings, code: str, key: str) -> None:
    assert problems(Config.make, settings) == [(code, key)]


CONDITIONAL = [key for key in KEYS if only_if_of(Config, key)]


def another(key: str):
    """Return a value of a key that is not its default."""
    default = defaults_of(Config)[key]
    number = default + 1 if isinstance(default, int) else 0.7
    texts = {
        "variance": "pooled",
        "test-bn": "mix",
        "lr-decay-factor": "0.5",
        "optimizer": "adam",
    }
    return texts.get(key, number)


@pytest.mark.parametrize("key", CONDITIONAL)
def test_a_key_whose_conditions_are_not_met_has_no_effect(key: str) -> None:
    settings = {key: another(key)}
    for other, values in only_if_of(Config, key).items():
        if values != SET and defaults_of(Config)[other] in values:
            settings[other] = {
                "norm": "group",
                "partition": "iid",
                "optimizer": "adam",
                "loop": "my_module:my_loop",
            }[other]
    with pytest.raises(ConfigError) as caught:
        check_keys(settings)
    (problem,) = [one for one in caught.value.problems if one.key == key]
    assert problem.code == "no-effect"
    assert "has no effect: it is for " in problem.text


@pytest.mark.parametrize("name", thinned(METHODS))
def test_a_shared_key_without_effect_is_left_out(name: str) -> None:
    """A key and the method that reads it have the same conditions."""
    for key in CONDITIONAL:
        own, shared = {"strategy": name}, {key: another(key)}
        told = problems(Config.make_of_shared, shared, own)
        assert "no-effect" not in {code for code, _ in told}
        if not told:
            config, dropped = Config.make_of_shared(shared, own)
            assert (key in dropped) == (config == Config.make(own)), key


def check_keys(settings: dict) -> None:
    raise_or_warn(checked_keys(Config, settings)[1], "")
