"""The laboratory takes users' tasks in data, pages, comparisons and studies."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.diagnose_run import diagnose_run
from fedbn_flwr.lab.early_stopping import validation_metric
from fedbn_flwr.lab.new_site import calibrate_run
from fedbn_flwr.lab.report.words import directed, with_unit, word
from fedbn_flwr.lab.results.evaluate import evaluate_run
from fedbn_flwr.lab.results.intervals import Interval
from fedbn_flwr.lab.results.ranking import result_of
from fedbn_flwr.lab.results.sites import sites_of_run
from fedbn_flwr.lab.results.tests_table import metric_in, read_tests
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.studies.sweep import sweep
from tests.support.commands import output_of
from tests.support.runs import page_of, state_of, summary_of
from tests.support.studies import load

SETTINGS = {
    "dataset": "tests.support.boxes:data",
    "task": "tests.support.boxes:LOW",
    "model": "tests.support.boxes:Net",
    "num-clients": 3,
    "num-server-rounds": 2,
    "batch-size": 3,
    "validation-share": 0.34,
}


def test_a_run_has_a_row_and_a_page_for_each_site(tmp_path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    run(Config.make({**SETTINGS, "early-stopping": 2}), one, workers=0)
    run(Config.make({**SETTINGS, "strategy": "fedbn"}), other, workers=2)
    run(Config.make(SETTINGS), tmp_path / "workers", workers=2)
    for name, entry in state_of(one).items():
        assert torch.equal(entry, state_of(tmp_path / "workers")[name])
    table = pd.read_csv(one / "predictions.csv")
    assert table["site"].tolist() == ["site-0", "site-1", "site-2"]
    assert table["target"].tolist() == [6, 6, 6]
    tests = read_tests(other)
    assert {"error", "largest", "loss"} == {*tests["metric"]}
    found = sites_of_run(one, other)
    assert found.mean.value == pytest.approx(table["output"].mean())
    assert found.mean.error == pytest.approx(table["output"].std() / 3**0.5)
    assert found.gap.error is not None
    assert all("groups" not in row for row in found.rows)
    result = result_of(one)
    assert (result.metric, result.examples) == ("error", 18)
    page = page_of(one)
    assert "Test error (lower is better) after round" in page
    assert "one value for each site, not for each example" in page
    assert "largest, %" not in page
    shown = output_of("evaluate", one, "--against", other)
    assert "(lower is better)" in shown
    (note,) = [one for one in diagnose_run(one).notes if "task" in one]
    assert "a task of your own" in note


def test_what_needs_classes_is_refused_in_one_sentence(tmp_path) -> None:
    with pytest.raises(ConfigError, match="class-moments needs one class"):
        Config.make({**SETTINGS, "class-moments": True})
    run(Config.make(SETTINGS), tmp_path / "run", workers=0)
    with pytest.raises(ConfigError, match="a task of your own"):
        calibrate_run(tmp_path / "run", "tests.support.boxes:new", tmp_path / "out")
    found = evaluate_run(
        tmp_path / "run", "tests.support.boxes:new", tmp_path / "new"
    ).rows[0]
    assert found.result.num_examples == 6
    assert {*found.result.metrics} == {"error", "largest"}
    written = json.loads((tmp_path / "new/metrics.json").read_text())
    assert written["results"][0]["error"] == found.result.metrics["error"]


STUDY = """
name: boxes
seeds: [0, 1]
base: {dataset: tests.support.boxes:data, model: tests.support.boxes:Net, num-clients: 2, num-server-rounds: 1,
  batch-size: 3, validation-share: 0.34}
splits: {natural: {}}
methods: {low: {task: tests.support.boxes:LOW}, high: {task: tests.support.boxes:HIGH}}
"""


def test_two_tasks_with_one_score_name_keep_their_directions(tmp_path) -> None:
    study = load(tmp_path, STUDY)
    table = sweep(study, tmp_path / "out")
    labels = ["test-error (lower is better)", "test-error, %"]
    assert table["metric"].tolist() == labels
    for seed in (0, 1):
        low, high = (
            result_of(tmp_path / f"out/{name}/natural/seed-{seed}").metric
            for name in ("low", "high")
        )
        assert low == high == "error"
        assert directed(low) == "error (lower is better)"
        assert directed(high) == "error"
        assert word(Interval(1.0, 0.1), low) == "worse"
        assert word(Interval(1.0, 0.1), high) == "better"
        assert with_unit(0.5, high) == "50.0 %"
    summary = summary_of(tmp_path / "out/high/natural/seed-0")
    assert metric_in(summary, prefix=True) == "test-error"
    config = Config.make({**SETTINGS, "task": "tests.support.boxes:HIGH"})
    assert validation_metric(config).share
    page_of(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no_pairs", "Return a pair of input and target"),
        ("one_collated", "returned a dict. Return a pair"),
        ("not_collated", "collate_fn of 2 examples: TypeError"),
    ],
)
def test_data_that_are_no_pairs_are_refused(tmp_path, name: str, told: str) -> None:
    own = {**SETTINGS, "dataset": f"tests.support.boxes:{name}"}
    with pytest.raises((ConfigError, DataError), match=told):
        run(Config.make(own), tmp_path / "run", workers=0)
