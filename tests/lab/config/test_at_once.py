"""What is said of a config before torch is imported is all that the full check says of it."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import CENTRALIZED, GROUPS, Config
from fedbn_flwr.lab.config.at_once import problems_at_once, refuse_at_once
from fedbn_flwr.lab.config.table import table
from fedbn_flwr.lab.data import DATASETS, PARTITIONS
from fedbn_flwr.lab.models import MODELS
from fedbn_flwr.norms import NORMS
from fedbn_flwr.strategies import STRATEGIES

RECIPES = sorted(Path(__file__).parents[3].glob("apps/main/recipes/*.yaml"))
BAD = ["", "x", -1, 0, 1, 2.5, True, False, None, [1], {}, float("nan"), "0.5", "1e400", 10**30, "on"]
TOLD = {key: [*table()["allowed"].get(key, ()), "nothing"] for key in ("strategy", "norm", "dataset", "partition")}
TOLD |= {"model": [*MODELS, "nothing", "torchvision:resnet18"], "num-server-rounds": [1, 5, 20], "local-steps": [0, 3]}
TOLD |= {"local-epochs": [0, 2], "early-stopping": [2], "num-classes": [5, 10, 99]}
TOLD |= {"classes-per-client": [3, 50], "optimizer": ["adam"], "sgd-momentum": [0.9]}
TOLD |= {"feature-norm": ["1", "2"], "missing": ["mean"]}
# Values that the table cannot judge.
LATER = {"dp": ["server", "off", False], "local-part": ["fedbn", "x"], "eval-on": ["x", "personal-own"]}
LATER |= {"series": ["/"], "augment": ["flip", "x"], "lr-decay-at": ["5,x"], "task": ["x"]}
LATER |= {"freeze-at": [0.5, "auto", "x"], "server-learning-rate": [-1.0, 2.0], "metrics": ["x"]}
UNKNOWN = ["sed", "batch_size", "batchsize", "x", 3]


def full(settings: dict[Any, Any]) -> list[str]:
    try:
        Config.make(settings)
    except ConfigError as error:
        return str(error).split("\n")
    return []


def drawn(draw: random.Random) -> dict[Any, Any]:
    """Up to six settings: good ones, bad values of any key, and unknown keys."""
    settings: dict[Any, Any] = {}
    keys = [key for group in GROUPS for key in Config.keys(group)]
    for _ in range(draw.randint(1, 6)):
        kind = draw.random()
        if kind < 0.5:
            key = draw.choice([*TOLD])
            settings[key] = draw.choice(TOLD[key])
        elif kind < 0.6:
            key = draw.choice([*LATER])
            settings[key] = draw.choice(LATER[key])
        elif kind < 0.8:
            settings[draw.choice(keys)] = draw.choice(BAD)
        else:
            settings[draw.choice(UNKNOWN)] = draw.choice(BAD)
    return settings


def test_what_is_told_at_once_is_what_the_full_check_tells() -> None:
    draw = random.Random(51)
    told = 0
    for _ in range(1500):
        settings = drawn(draw)
        if at_once := problems_at_once(settings):
            told += 1
            assert at_once == full(settings), settings
    assert told > 500


@pytest.mark.parametrize("names", ["strategy norm", "dataset model", "dataset partition"])
def test_every_pair_of_names_beside_a_typing_error(names: str) -> None:
    keys = names.split()
    registries: dict[str, Any] = {"strategy": [*STRATEGIES, CENTRALIZED], "norm": NORMS, "model": MODELS}
    registries |= {"dataset": DATASETS, "partition": PARTITIONS}
    for pair in product(*(registries[key] for key in keys)):
        settings = {**dict(zip(keys, pair, strict=True)), "sed": 1}
        if at_once := problems_at_once(settings):
            assert at_once == full(settings), settings


def test_every_key_has_its_default_in_the_table() -> None:
    defaults = {field.alias or name: field.default for name, field in Config.model_fields.items()}
    assert {key: entry["default"] for key, entry in table()["keys"].items()} == defaults
    judged = {key: value for key, value in defaults.items() if table()["keys"][key]["schema"]}
    assert problems_at_once(judged) == []
    assert problems_at_once({**judged, "sed": 1}) == ["unknown key 'sed'. Did you mean 'seed'?"]


def test_a_typing_error_beside_most_recipes_is_told_at_once() -> None:
    """Not where the checks of the method read what the recipe sets: its rounds, a schedule, a norm, a test."""
    later = {"fbn", "fedadagrad", "fedadam", "fedbs", "fedtan2", "fedwon", "fedyogi", "fixbn", "hbn", "test-bn"}
    found = set()
    for path in RECIPES:
        settings = yaml.safe_load(path.read_text())
        if "base" not in settings and not problems_at_once({**settings, "sed": 1}):
            found.add(path.stem)
    assert found <= later
    assert len(RECIPES) - len(found) > 12


def test_an_old_name_is_left_to_the_full_check_which_warns_of_it(caplog) -> None:
    refuse_at_once(None, ["fedtan-exchange=messages", "sed=1"])
    assert not caplog.records


def test_a_file_that_cannot_be_read_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        refuse_at_once(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("[1]")
    with pytest.raises(ConfigError):
        refuse_at_once(tmp_path / "list.yaml")
    (tmp_path / "good.yaml").write_text("{seed: 1}")
    with pytest.raises(ConfigError, match="sed"):
        refuse_at_once(tmp_path / "good.yaml", ["sed=1"])
