"""Recipes for each strategy and two options state a command and an accuracy."""

from __future__ import annotations

import re

import pytest

from fedbn_flwr.lab.config import Config, method_of
from fedbn_flwr.lab.runs.check_start import checked_config
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.studies.check_study import load_study
from fedbn_flwr.strategies import STRATEGIES
from tests.support.checkout import ROOT

FOLDER = ROOT / "apps/main/recipes"
STUDY = "demo"
OPTIONS = {"feature-norm": "sqrt-d", "test-bn": "mix"}
RECIPES = sorted({path.stem for path in FOLDER.glob("*.yaml")} - {STUDY})
HEADER = re.compile(
    r"# .+\.\n#   fedbn-flwr run apps/main/recipes/(?P<file>[\w-]+)\.yaml --out"
    r" runs/[\w-]+\n"
    r"# Digits, .+\. Reaches (?P<accuracy>\d+\.\d\d) % on (?P<on>the whole test set|the"
    r" clients' own two classes) \("
)


def test_every_strategy_has_one_recipe_and_so_have_two_options() -> None:
    assert sorted([*STRATEGIES, *OPTIONS]) == RECIPES
    for name in RECIPES:
        settings = Config.load(FOLDER / f"{name}.yaml").to_mapping()
        key, value = (name, OPTIONS[name]) if name in OPTIONS else ("strategy", name)
        assert settings[key] == value


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_loads_and_says_how_to_run_it(name: str) -> None:
    path = FOLDER / f"{name}.yaml"
    config = Config.load(path)
    checked_config(config)
    header = HEADER.match(path.read_text())
    assert header is not None
    assert header["file"] == name
    local = method_of(config).methods.own_models
    assert (header["on"] == "the clients' own two classes") == local


def test_the_study_loads() -> None:
    assert [*load_study(FOLDER / f"{STUDY}.yaml").cells()]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_reaches_the_accuracy_it_states(name: str, tmp_path) -> None:
    """The accuracy may differ by two points.

    Other processors round differently, and the run on non-IID data amplifies the
    difference.
    """
    path = FOLDER / f"{name}.yaml"
    summary = run(Config.load(path), tmp_path / "out")
    header = HEADER.match(path.read_text())
    assert header is not None
    assert 100 * summary["final"][summary["headline"]] == pytest.approx(
        float(header["accuracy"]), abs=2
    )
