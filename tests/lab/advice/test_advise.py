"""Advice has an answer, a config that runs, and continues after a kill."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import re
import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

from fedbn_flwr.errors import ConfigError, RunFailedError
from fedbn_flwr.lab.advice.advisor import RECOMMENDED_FILE, advise
from fedbn_flwr.lab.advice.candidates import ALONE, FEDAVG, candidates
from fedbn_flwr.lab.advice.halving import (
    SHORTEST,
    affordable,
    cost,
    lengths,
    of_length,
)
from fedbn_flwr.lab.advice.verdict import benefit
from fedbn_flwr.lab.cli import app
from fedbn_flwr.lab.config import Config, learning_rate_of
from fedbn_flwr.lab.files import ADVICE_FILE, STUDY_FILE, read_metrics
from fedbn_flwr.lab.report import write_report
from fedbn_flwr.lab.studies.study import Study
from fedbn_flwr.lab.studies.sweep import LogFollower
from tests.support.fast import fast

pytestmark = pytest.mark.xdist_group("advice")  # one advice for all tests


def net(num_classes: int, features: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(features, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, num_classes),
    )


def sites(site: int, part: str) -> TensorDataset:
    """Return rows of three classes. The sites differ in scale and offset."""
    generator = torch.Generator().manual_seed(10 * site + (part == "test"))
    targets = torch.arange(30) % 3
    inputs = torch.randn(30, 4, generator=generator)
    inputs[:, :3] += 2 * nn.functional.one_hot(targets, 3)
    return TensorDataset((site + 1) * inputs + 3 * site, targets)


sites.input_shape = (4,)  # type: ignore[attr-defined]
sites.site_names = ["north", "south", "west"]  # type: ignore[attr-defined]


def own_loop(model: Any, batches: Any, rules: Any, learning_rate: float) -> float:
    optimizer = rules.wrap(torch.optim.Adam(model.parameters(), learning_rate))
    for inputs, targets in batches:
        optimizer.zero_grad()
        with rules.step(len(targets)):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
        optimizer.step()
    return loss.item()


GIVEN: Mapping[str, Any] = {
    "task": "classification",
    "num-classes": 3,
    "num-clients": 3,
    "num-server-rounds": 8,
    "local-steps": 2,
    "batch-size": 8,
    "strategy": "fedbn",
    "seed": 2,
}


def advice_of(out: Path, **options: Any) -> dict[str, Any]:
    given = {"methods": ["fedbn"], "parallel": 1, **options}
    return advise(net, sites, out, GIVEN, **given)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("advice")
    advice_of(folder)
    return folder


@pytest.fixture
def advice(out: Path) -> dict[str, Any]:
    return json.loads((out / ADVICE_FILE).read_text())


def test_the_best_validation_score_is_recommended_in_a_config_that_runs(
    out: Path, advice: dict[str, Any]
) -> None:
    names = [one["name"] for one in advice["candidates"]]
    assert names == [FEDAVG, ALONE, "FedAvg+GN", "FedBN"]
    assert [len(trial["scores"]) for trial in advice["trials"]] == [12]
    best, *_ = advice["ranking"]
    sites = [site["site"] for site in advice["alone"]["sites"]]
    assert sites == ["north", "south", "west"]
    assert advice["seeds"] == [2, 3, 4]
    for row in advice["ranking"]:
        late = [
            line["personal-validation-accuracy"]
            for run in out.glob(f"{row['method'].replace(' ', '_')}/all/seed-*")
            for line in read_metrics(run / "metrics.jsonl")[6:]
        ]
        assert len(late) == 6
        assert row["score"] == pytest.approx(statistics.fmean(late))

    (settings,) = (
        one["settings"] for one in advice["candidates"] if one["name"] == best["method"]
    )
    config = Config.load(out / RECOMMENDED_FILE)
    assert (config.strategy, config.norm, config.learning_rate) == (
        settings["strategy"],
        settings.get("norm", "batch"),
        best["learning-rate"],
    )
    assert (config.num_server_rounds, config.validation_share) == (8, 0)
    assert config.seed == 2
    assert advice["answer"][0] in write_report(out).read_text()


ALL_KILLS = (3, 20, 31, 47)


@pytest.mark.parametrize("kills", fast([1, len(ALL_KILLS)], 0))
def test_an_advice_that_is_killed_gives_the_same_answer_when_it_continues(
    out: Path, advice: dict[str, Any], tmp_path: Path, kills: int
) -> None:
    """The fast case has all runs of the advice except the last seed."""

    class Killed(LogFollower):
        def __init__(self, after: int) -> None:
            self.left = after

        def begin(self, cell: Any) -> Any:
            def on_round(line: Any) -> None:
                self.left -= 1
                if not self.left:
                    raise KeyboardInterrupt

            return on_round

    if kills == 1:
        shutil.copytree(out, tmp_path, dirs_exist_ok=True)
        for path in tmp_path.glob("*/all/seed-4"):
            shutil.rmtree(path)
        (tmp_path / ADVICE_FILE).unlink()
        (tmp_path / RECOMMENDED_FILE).unlink()
    for after in ALL_KILLS[:kills]:
        with pytest.raises(KeyboardInterrupt):
            advice_of(tmp_path, follower=Killed(after))
    again = advice_of(tmp_path)
    assert (tmp_path / RECOMMENDED_FILE).read_bytes() == (
        out / RECOMMENDED_FILE
    ).read_bytes()
    for one in (advice, again):
        for row in one["ranking"]:
            del row["seconds"]
    assert json.loads(json.dumps(again)) == advice


@pytest.mark.parametrize("page", fast([False, True], False))
def test_validation_results_after_the_choice_change_nothing(
    out: Path, advice: dict[str, Any], tmp_path: Path, page: bool
) -> None:
    """The page and the benefit are made from the test examples."""
    other = shutil.copytree(out, tmp_path / "other")
    draw = random.Random(0)
    for file in other.glob("*/all/seed-*/metrics.jsonl"):
        lines = read_metrics(file)
        keys = [key for key in lines[-1] if "validation" in key]
        assert keys
        for key, line in itertools.product(keys, lines):
            line[key] = draw.random()
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    chosen = {row["method"]: row["score"] for row in advice["ranking"]}
    study = Study.read(other / STUDY_FILE)
    again = benefit(study, chosen, advice["metric"], other)
    assert {key: advice[key] for key in again} == json.loads(json.dumps(again))
    if not page:
        return
    first, second = (write_report(each).read_text() for each in (out, other))
    of_place = rf"Made by .*|{re.escape(str(tmp_path))}\S*|{re.escape(str(out))}\S*"
    assert re.sub(of_place, "", first) == re.sub(of_place, "", second)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rounds": 60}, "too small for one halving of 12 trials. Give at least 113 "),
        ({"rounds": 101}, "too small for one halving of 12 trials. Give at least 113 "),
        ({"rounds": 60, "hours": 1.0}, "two budgets"),
        ({"rates": [0.1, 0.2, 0.1]}, "three different"),
        ({"rates": [0.1, 0.2, -0.1]}, "above 0"),
        ({"hours": math.inf}, "hours=inf"),
        ({"hours": 1e-9}, "too small"),
        ({"methods": ["centralized"]}, "data of all sites"),
        ({"metric": "acuracy"}, "acuracy"),
        ({"methods": ["fedbm"]}, "fedbm"),
        ({"methods": ["fedwon norm=wsconv"]}, "FedWon"),
    ],
)
def test_bad_input_is_refused_before_the_trials(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        advice_of(tmp_path, **options)
    assert not (tmp_path / "tune").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"validation-share": 0.0}, "validation"),
        ({"num-server-rounds": 4}, "num-server-rounds"),
        ({"num-server-rounds": 1}, "num-server-rounds"),
    ],
)
def test_settings_without_an_answer_are_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        advise(net, sites, tmp_path, {**GIVEN, **settings})
    assert not (tmp_path / "tune").exists()


def test_a_folder_with_another_use_is_refused(out: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match="new or empty folder"):
        advice_of(tmp_path)
    for rounds in (101, 102):
        with pytest.raises(ConfigError, match=f"budget of {rounds} rounds"):
            advice_of(tmp_path / "new", rounds=rounds)
        assert not (tmp_path / "new").exists(), "refused before any work"
    with pytest.raises(ConfigError, match="metrics"):
        advice_of(out, metric="auroc")


def test_if_all_trials_diverge_there_is_no_advice(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="all 12 trials diverged"):
        advice_of(tmp_path, rates=[1e30, 2e30, 3e30], loop=own_loop)
    assert not (tmp_path / ADVICE_FILE).exists()
    configs = [Config.load(path) for path in tmp_path.rglob("config.yaml")]
    assert {config.loop for config in configs} == {f"{__name__}:own_loop"}


def test_one_model_for_all_sites_is_not_compared_with_training_alone() -> None:
    base = {"num-clients": 3, "eval-on": "global"}
    tried, left_out = candidates({}, base, [], most=9)
    metrics = {one.name: one.metric for one in tried}
    assert metrics[ALONE] == "personal-validation-accuracy"
    assert metrics[FEDAVG] == metrics["FixBN"] == "validation-accuracy"
    assert "FedBN" not in metrics
    assert "eval-on" in left_out["FedBN"]


@given(points=st.integers(6, 12), budget=st.integers(1, 3000))
def test_the_whole_runs_are_the_longest_within_the_budget(
    points: int, budget: int
) -> None:
    if cost(SHORTEST + 1, points) <= budget:
        rounds = affordable(budget, points, 100)
        assert cost(rounds, points) <= budget
        assert rounds == 100 or cost(rounds + 1, points) > budget
        assert all(SHORTEST <= length < rounds for length in lengths(rounds))


def test_what_happens_in_a_run_happens_at_the_same_share_of_a_short_run() -> None:
    full = {"num-server-rounds": 80, "lr-decay-at": "20,0.5,freeze", "freeze-at": 60}
    settings = {**full, "strategy": "fixbn", "num-clients": 3}
    short = Config.make(of_length(settings, 8, 80))
    assert (short.num_server_rounds, short.freeze_at) == (8, 0.75)
    assert learning_rate_of(short).decay_after == (2, 4, "freeze")
    assert of_length({"strategy": "fedtan2"}, 4, 80)["fedtan-rounds"] == 1
    window = of_length({"freeze-at": "auto", "freeze-window": 40}, 8, 80)
    assert window["freeze-window"] == 4


def test_the_command_prints_the_answer(out: Path, advice: dict[str, Any]) -> None:
    own = {"model": f"{__name__}:net", "dataset": f"{__name__}:sites"}
    settings = {**GIVEN, **own}
    options = [f"--set={key}={value}" for key, value in settings.items()]
    command = ["advise", *options, "--out", str(out), "--methods", "fedbn"]
    result = CliRunner().invoke(app, [*command, "--parallel", "1"])
    assert result.exit_code == 0, result.output
    for sentence in (*advice["answer"], *advice["conditions"]):
        assert sentence in result.output


def test_a_function_without_a_module_is_refused(tmp_path: Path) -> None:
    """A decorated function has the name of another function."""
    for function in (lambda: None, functools.wraps(net)(lambda *args: None)):
        with pytest.raises(ConfigError, match="at the top of a module"):
            advise(function, sites, tmp_path, GIVEN)


@pytest.mark.slow
def test_each_trial_trains_with_the_own_loop(tmp_path: Path) -> None:
    lines: list[str] = []
    advice = advice_of(
        tmp_path, loop=own_loop, methods=["fedbn", "scaffold"], say=lines.append
    )
    # The loop uses Adam, so SCAFFOLD fails in all its trials, and the others continue.
    refused = [why for name, why in advice["left-out"].items() if "Scaffold" in name]
    assert len(refused) == 3
    assert all("optimizer=Adam must be sgd" in why for why in refused)
    assert any("Left out: Scaffold" in line for line in lines)
    assert "Scaffold" not in str(advice["trials"])
    configs = [Config.load(path) for path in tmp_path.rglob("config.yaml")]
    assert len(configs) >= 1 + 15 + 9
    assert {config.loop for config in configs} == {f"{__name__}:own_loop"}
    assert Config.load(tmp_path / RECOMMENDED_FILE).loop == f"{__name__}:own_loop"
