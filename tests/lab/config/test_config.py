"""The config has the same keys everywhere and reports all problems together."""

from __future__ import annotations

import math
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from flwr.common.config import parse_config_args

from apps.flower_processes import toml_pairs
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config, learning_rate_of
from fedbn_flwr.lab.config.fields import _NO_KEYS, config_fields
from fedbn_flwr.lab.config.yaml_text import as_yaml, read_overrides, read_yaml
from fedbn_flwr.strategies import STRATEGIES
from tests.support.checkout import PYPROJECT

# A value other than its default for every key; each must arrive unchanged.
OTHERS = {
    "data-dir": "/data/with space and 'quotes'",
    "eval-on": "global,personal-own",
    "lr-decay-at": "0.5,15",
    "lr-decay-factor": "0.1,0.2",
    "augment": "crop2,flip",
    "freeze-at": "auto",
    "freeze-window": 5,
    "freeze-tau": 1e-9,
    "local-steps": 5,
    "local-epochs": 0,
    "device": "cpu",
    "amp": True,
    "freeze-affine": True,
    "variance": "pooled",
    "strategy": "fixbn",
    "model": "torchvision:resnet18",
    "dataset": "cifar10",
    "partition": "dirichlet",
    "out": "/tmp/ünï",
    "num-classes": 12,
    "fraction-train": 0.5,
}


@pytest.fixture
def path(tmp_path) -> Path:
    """Return the path of a config."""
    return tmp_path / "config.yaml"


# One schema, everywhere.


def test_every_key_is_in_the_toml_with_its_default() -> None:
    """To Flower, 1 is not 1.0, so the types are equal as well."""
    declared = PYPROJECT["tool"]["flwr"]["app"]["config"]
    defaults = {
        field.alias or name: field.default
        for name, field in Config.model_fields.items()
    }
    assert declared == defaults
    kinds = {key: type(value) for key, value in declared.items()}
    mapping = Config.make({}).to_mapping()
    assert kinds == {key: type(value) for key, value in mapping.items()}


def test_every_parameter_of_a_strategy_is_a_key() -> None:
    """A parameter without a key could be set only from Python."""
    keys = set(Config.model_fields)
    # validation-share chooses the first
    of_python = {"loss_key", "fedtan_timeout", "variance_floor", *_NO_KEYS}
    for name, strategy in STRATEGIES.items():
        fields = config_fields(strategy.Params)
        assert fields.keys() <= keys, name
        without = strategy.Params.model_fields.keys() - fields.values()
        assert without <= of_python, name


def test_yaml_set_and_run_config_give_the_same_config(path) -> None:
    values = {**OTHERS, "num-server-rounds": 30}
    config = Config.make(values)
    path.write_text(yaml.safe_dump(values))
    assert Config.load(path) == config
    texts = {key: yaml.safe_dump(value) for key, value in values.items()}
    words = [f"{key}={text.splitlines()[0]}" for key, text in texts.items()]
    assert Config.load(None, words) == config
    # Flower's command line passes the mapping, with types, to the app.
    through_flower = parse_config_args([toml_pairs(config.to_mapping())])
    assert Config.make(dict(through_flower), complete=True) == config


def test_each_default_may_be_written_without_quotes(path) -> None:
    """YAML reads some words, such as off, as true and false."""
    config = Config.make({})
    lines = [f"{key}: {value}" for key, value in config.to_mapping().items() if value]
    path.write_text("\n".join(lines))
    assert "dp: off" in lines
    assert Config.load(path) == config
    assert Config.load(None, [line.replace(": ", "=", 1) for line in lines]) == config


@pytest.mark.parametrize("text", ["1.10", "1_0", "+3", "1.0", "0.50", "7", "1e-3"])
def test_a_value_is_a_text_until_its_key_makes_it_a_number(text: str, path) -> None:
    """Layer 1.10 is not layer 1.1."""
    written = f"learning-rate: {text}\ntrain-only: {text}\n"
    path.write_text(written)
    in_file = read_yaml(path, "config")
    given = read_overrides([f"learning-rate={text}", f"train-only={text}"])
    assert as_yaml(given) == written
    for config in map(Config.make, (in_file, given)):
        assert config.learning_rate == float(text.replace("_", ""))
        assert config.train_only == text


WORDS = ["01", "1:30", "no", "on", "null", "~", "2026-13-45", "0x1F", "=", "true"]


@pytest.mark.parametrize("text", WORDS)
def test_a_word_of_yaml_stays_a_name(text: str, path) -> None:
    """In YAML 1.1, 01 is an octal number, ``no`` is false, and ``~`` is nothing."""
    path.write_text(f"held-out-clients: {text}\n")
    for config in (Config.load(path), Config.load(None, [f"held-out-clients={text}"])):
        assert config.held_out_clients == text


@pytest.mark.parametrize("text", ["5", "5.0", "0.5", "1", "1.0", "auto"])
def test_a_round_is_a_whole_number_and_a_share_is_not(text: str, path) -> None:
    path.write_text(f"{{strategy: fixbn, freeze-at: {text}, num-server-rounds: 300}}")
    expected = {"auto": "auto"}.get(text) or (float if "." in text else int)(text)
    if text == "5.0":
        with pytest.raises(ConfigError, match="freeze-at"):
            Config.load(path)
        return
    found = Config.load(path).freeze_at
    assert (type(found), found) == (type(expected), expected)


# Refusals.


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"- a\n- b\n", "is a list"),
        (b"# no key\n", "is empty"),
        (b"a: [", "config "),
        (b"\x89PNG\r\n\x1a\n", "UTF-8"),
        (b"a: \xff", "UTF-8"),
        ("seed: 1".encode("utf-16"), "UTF-8"),
        (b"seed: 1\n\n'seed': 2", "line 3: 'seed' is also in line 1"),
        # Some YAML readers silently use the last value.
        (b"{seed: 1, seed: 2}", "line 1: 'seed' is also in line 1"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(
    path, content: bytes, named: str
) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=named):
        Config.load(path)


@pytest.mark.parametrize("override", ["seed", "seed=["])
def test_an_override_that_cannot_be_read_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=f"--set '{re.escape(override)}'"):
        Config.load(None, [override])


def test_what_the_compose_file_sets_for_every_run_is_left_out_where_it_has_no_effect() -> (
    None
):
    """The service ``cli`` sets FedTAN's channel in each run config.

    Elsewhere such a key is refused.
    """
    preset = {
        "fedtan-transport": "channel",
        "fedtan-bind": "a:9200",
        "fedtan-address": "b:9200",
        "fedtan-tls-dir": "/c",
    }
    plain = Config.make({})
    assert Config.make({**plain.to_mapping(), **preset}, complete=True) == plain
    fedtan = Config.make({**preset, "strategy": "fedtan"}, complete=True)
    assert fedtan.fedtan_bind == "a:9200"
    with pytest.raises(ConfigError, match="fedtan-bind='a:9200' has no effect"):
        Config.make(preset)
    with pytest.raises(
        ConfigError,
        match=r"^proximal-mu=2\.0 has no effect: [^\n]* fedbs \[no-effect\]$",
    ):
        Config.make({**preset, "proximal-mu": 2.0}, complete=True)


# Conditions between keys.


def test_a_default_counts_as_not_set_because_flower_passes_every_key() -> None:
    settings = {**Config.make({}).to_mapping(), "local-steps": 5}
    assert Config.make(settings, complete=True).local_steps == 5
    with pytest.raises(
        ConfigError, match=r"^local-steps=5 and local-epochs=2 are both set.*\Z"
    ):
        Config.make({**settings, "local-epochs": 2}, complete=True)


@pytest.mark.parametrize("seed", range(40))
def test_a_decay_changes_a_rate_or_is_named(seed: int) -> None:
    """A fraction is read as a decimal number, so 0.29 of 100 is 29."""
    draw = random.Random(seed)
    rounds = draw.choice([2, 3, 7, 8, 100])
    freeze = draw.randrange(1, rounds)
    texts = draw.sample(["0.29", "1.0", "0.5", "7", "8", "freeze"], 3)
    factors = draw.choices(["0.1", "1.0", "2"], k=3) if seed % 4 else ["0.5"]
    settings = {"strategy": "fixbn", "num-server-rounds": rounds, "freeze-at": freeze}
    settings |= {"lr-decay-at": ",".join(texts), "lr-decay-factor": ",".join(factors)}
    config = Config.make(settings)
    decays = {}
    for text, factor in zip(texts, factors * (3 // len(factors)), strict=True):
        share = rounds if "." in text else 1
        after = freeze if text == "freeze" else int(Fraction(text) * share)
        decays[after, text] = float(factor)
        named = any(f"lr-decay-at={text} " in line for line in config.warnings())
        assert named == (after >= rounds or factor == "1.0")
    rate = learning_rate_of(config)
    for number in range(1, rounds + 1):
        passed = [one for (after, _), one in decays.items() if number > after]
        assert rate.at(number, number > freeze) == pytest.approx(
            0.1 * math.prod(passed)
        )
