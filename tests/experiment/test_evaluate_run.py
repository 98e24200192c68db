"""A run's model on any data: the figures of the run on its own data, its preprocessing, its BN, and refusals."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedbn_flwr import global_state, personal_state
from fedbn_flwr.cli import app
from fedbn_flwr.data import DATASETS, Subset
from fedbn_flwr.errors import ConfigError, DataError, StateError
from fedbn_flwr.experiment.config import Config
from fedbn_flwr.experiment.evaluate_run import _predictions, evaluate_run
from fedbn_flwr.experiment.partitioned_data import partitioned_data
from fedbn_flwr.experiment.setup import make_model
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.tasks import BINARY, CLASSIFICATION, MULTI_LABEL, REGRESSION, Task


@pytest.fixture
def fedavg(quick_run) -> tuple[dict, Path]:
    return quick_run(**{"num-server-rounds": 4, "learning-rate": 0.3})


def test_on_the_runs_own_data_the_figures_are_those_of_the_run(fedavg, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    summary, run = fedavg
    arguments = ["evaluate", str(run), "--dataset", "digits", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "model: the global model" in result.output
    found = json.loads((tmp_path / "out/metrics.json").read_text())
    (row,) = found["results"]
    assert row["accuracy"] == summary["final"]["test-accuracy"]
    assert row["loss"] == pytest.approx(summary["final"]["test-loss"], rel=1e-6)
    assert f" {row['accuracy']:.4f}" in result.output
    with (tmp_path / "out/predictions.csv").open() as file:
        predictions = list(csv.DictReader(file))
    assert len(predictions) == row["examples"] == 359
    assert list(predictions[0]) == ["index", "target", "prediction", *(f"probability-{k}" for k in range(10))]
    right = [line["target"] == line["prediction"] for line in predictions]
    assert sum(right) / len(right) == pytest.approx(row["accuracy"])
    for line in predictions[:5]:
        scores = [float(line[f"probability-{k}"]) for k in range(10)]
        assert sum(scores) == pytest.approx(1, abs=1e-4)
        assert int(line["prediction"]) == scores.index(max(scores))
    assert CliRunner().invoke(app, arguments).exit_code == 2, "nothing is written over"


def test_groups_and_parts(quick_run) -> None:
    _, run = quick_run(dataset="digits-domains", partition="domain", **{"num-clients": 5})
    config = Config.load(run / "config.yaml")
    model, data = make_model(config), partitioned_data(config, 5)
    model.load_state_dict(global_state(run))
    expected = {name: evaluate(model, view).accuracy for name, view in data.domain_views().items()}
    what, rows = evaluate_run(run, {"dataset": "digits-domains"})
    assert {row.data: row.result.accuracy for row in rows[1:]} == expected
    assert rows[0].result.num_examples == len(data.dataset.test)
    both = evaluate_run(run, {"dataset": "digits-domains"}, part="all")[1]
    train = evaluate_run(run, {"dataset": "digits-domains"}, part="train")[1]
    assert both[0].result.num_examples == rows[0].result.num_examples + train[0].result.num_examples
    pooled = sum(r[0].result.loss * r[0].result.num_examples for r in (rows, train)) / both[0].result.num_examples
    assert both[0].result.loss == pytest.approx(pooled, rel=1e-5)
    assert what == "the global model"


@pytest.mark.parametrize("model", ["mlp", "lenet"])
def test_other_data_get_the_shape_and_the_normalisation_of_those_of_the_run(quick_run, model: str) -> None:
    """LeNet takes images of any number of channels, here grey ones; these are in colour."""
    _, run = quick_run(model=model)
    config, other = Config.load(run / "config.yaml"), Config.make({"dataset": "digits-domains", "partition": "iid"})
    model, ours = make_model(config), partitioned_data(config, 3).dataset
    model.load_state_dict(global_state(run))
    theirs = partitioned_data(other, 1, (1, 28, 28)).dataset
    assert theirs.mean != ours.mean
    expected = evaluate(model, Subset(theirs.test, None, mean=ours.mean, std=ours.std))
    found = evaluate_run(run, {"dataset": "digits-domains"})[1][0].result
    assert (found.loss, found.accuracy) == pytest.approx((expected.loss, expected.accuracy), rel=1e-6)


def test_own_bn_and_averaged_bn_are_those_of_the_run(quick_run) -> None:
    _, run = quick_run(strategy="fedbn", **{"eval-on": "averaged-bn"})
    config = Config.load(run / "config.yaml")
    model, data = make_model(config), partitioned_data(config, 3)
    for bn, state in (("own:2", personal_state(run, 2)), ("averaged", global_state(run))):
        model.load_state_dict(state)
        (row,) = evaluate_run(run, {"dataset": "digits"}, bn)[1]
        assert row.result.loss == pytest.approx(evaluate(model, data.test_view()).loss, rel=1e-6)
    _, bare = quick_run(strategy="fedbn")
    for bn in ("", "averaged", "adapt"):
        with pytest.raises(StateError, match="A run with eval-on=averaged-bn saves the average"):
            evaluate_run(bare, {"dataset": "digits"}, bn)


def test_adapt_uses_the_statistics_of_the_new_inputs(fedavg) -> None:
    _, run = fedavg
    plain, adapted = evaluate_run(run, {"dataset": "digits"}, "adapt")[1]
    assert (plain.statistics, adapted.statistics) == ("as saved", "re-estimated")
    config = Config.load(run / "config.yaml")
    model, view = make_model(config), partitioned_data(config, 3).test_view()
    model.load_state_dict(global_state(run))
    # The MLP has one BN layer, so one batch with all inputs has the statistics of the two passes.
    whole = evaluate(model, view, batch_size=len(view), batch_statistics=True)
    assert adapted.result.loss == pytest.approx(whole.loss, rel=1e-5)
    assert plain.result.loss == pytest.approx(evaluate(model, view).loss, rel=1e-6) != adapted.result.loss


def test_what_does_not_fit_is_refused(fedavg, quick_run, tmp_path: Path) -> None:
    _, run = fedavg
    _, group = quick_run(norm="group", model="lenet")
    for folder, data, bn, kind, why in (
        (run, {"dataset": "digit"}, "", ConfigError, "unknown dataset 'digit'. Did you mean 'digits'"),
        (run, {"dataset": "digits", "model": "lenet"}, "", ConfigError, "model and norm are those of the run"),
        (run, {"dataset": "cityscapes"}, "", ConfigError, "is for segmentation"),
        (run, {"dataset": "usps"}, "", DataError, "data-dir is not set"),
        (run, {"dataset": "digits"}, "own", ConfigError, r"bn='own' is unknown. Allowed: averaged, own:CLIENT"),
        (run, {"dataset": "digits"}, "own:7", ConfigError, "the run has the clients 0 to 2"),
        (group, {"dataset": "digits"}, "adapt", ConfigError, "with norm=group needs BatchNorm. Leave bn out"),
        (tmp_path, {"dataset": "digits"}, "", ConfigError, "is no folder of a run"),
    ):
        with pytest.raises(kind, match=why):
            evaluate_run(folder, data, bn)
    with pytest.raises(ConfigError, match="unknown part 'validation'"):
        evaluate_run(run, {"dataset": "digits"}, part="validation")  # type: ignore[arg-type]


def test_other_classes_are_refused(fedavg, monkeypatch) -> None:
    _, run = fedavg
    for count in (9, 12):
        info = dataclasses.replace(DATASETS["digits"], name="others", num_classes=count)
        monkeypatch.setitem(DATASETS, "others", info)
        with pytest.raises(ConfigError, match=f"the run have 10 classes, dataset=others has {count}. Bring these data"):
            evaluate_run(run, {"dataset": "others"})


class Targets:
    def __init__(self, *targets: object) -> None:
        self.targets = torch.tensor(targets)


@pytest.mark.parametrize(
    ("task", "outputs", "targets", "lines"),
    [
        (BINARY, [[0.0], [2.0]], [1, 0], ["index,target,prediction,probability", "0,1,0,0.5", "1,0,1,0.880797"]),
        (REGRESSION, [1.5, -2.0], [1.0, 0.5], ["index,target,prediction", "0,1,1.5", "1,0.5,-2"]),
        (
            MULTI_LABEL,
            [[0.0, 2.0]],
            [[1.0, float("nan")]],
            [
                "index,target-a,target-b,prediction-a,prediction-b,probability-a,probability-b",
                "0,1,nan,0,1,0.5,0.880797",
            ],
        ),
        (
            CLASSIFICATION,
            [[0.0, 0.0]],
            [1],
            ["index,target,prediction,probability-a,probability-b", "0,1,0,0.5,0.5"],
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_predictions_of_each_task(task: Task, outputs: list, targets: list, lines: list[str]) -> None:
    text = _predictions(torch.tensor(outputs), Targets(*targets), task, ("a", "b"))
    assert text.splitlines() == lines
