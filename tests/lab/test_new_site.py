"""A model is calibrated at a site that did not train, from data in any form.

Labels change only the verdict, and the written model gives the written predictions.
"""

from __future__ import annotations

import html
import itertools
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from fedbn_flwr.client.personal_model import metadata
from fedbn_flwr.errors import ConfigError, DataError, NormLayerError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.new_site import calibrate_run
from fedbn_flwr.lab.results.evaluate import evaluate_run
from fedbn_flwr.lab.results.intervals import interval
from fedbn_flwr.lab.results.label_verdict import threshold_of_sites
from fedbn_flwr.lab.results.new_data import predictions
from fedbn_flwr.lab.results.predictions import BATCH, SiteTest, save_predictions
from fedbn_flwr.lab.results.saved_model import load_model
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.training.tasks import BINARY, TASKS
from tests.support.commands import output_of
from tests.support.runs import QUICK, config_of, state_of, summary_of
from tests.support.tables import named, table, targets_of_tasks

MODEL = "model_of_a_new_site"
CODE = """
from torch import nn

def net(num_classes, **_):
    body = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(144, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))
"""
CLASSES = 3
SHORT = {**QUICK, "num-clients": 2, "num-server-rounds": 1, "partition": "iid"}


def images(seed: int, count: int = 24) -> tuple:
    """Return grey images whose brightness depends on their class."""
    draw = np.random.default_rng(seed)
    classes = np.arange(count) % CLASSES
    x = draw.integers(0, 120, (count, 8, 8)) + 60 * classes[:, None, None]
    return x.astype(np.uint8), classes


def coloured(x) -> torch.Tensor:
    """Return the inputs of grey images for the model."""
    return torch.tensor(x)[:, None].float().expand(-1, 3, -1, -1) / 255


class Listed(list):
    """A data set that is not a TensorDataset."""


@pytest.fixture(scope="module")
def scans(tmp_path_factory) -> Iterator[Path]:
    """Provide a finished run on images of three classes."""
    folder = tmp_path_factory.mktemp("scans")
    (folder / f"{MODEL}.py").write_text(CODE)
    sys.path.insert(0, str(folder))
    x, y = images(0, 60)
    names = [f"{label}/{at:02}" for at, label in enumerate(y)]
    dataset = write_images(folder / "sites", x, names)
    data = {"dataset": dataset, "model": f"{MODEL}:net"}
    run(_config(data), folder / "run")
    yield folder / "run"
    sys.path.remove(str(folder))
    sys.modules.pop(MODEL)


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> Iterator[dict[str, Path]]:
    """Provide a finished run on rows of a table for each task of a table."""
    draw, found = np.random.default_rng(1), {}
    x = draw.normal(size=(40, 4)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        for task, y in targets_of_tasks(x).items():
            found[task] = tmp_path_factory.mktemp(task) / "run"
            dataset = table(patch, x, y, np.arange(40) % 2)
            settings = {"dataset": dataset, "model": "mlp", "task": task}
            run(_config(settings), found[task])
        yield found


def _config(settings: Mapping) -> Config:
    return Config.make({**SHORT, **settings})


def rows(count: int) -> np.ndarray:
    """Return rows of a table at a new site."""
    return np.random.default_rng(5).normal(1, 3, (count, 4)).astype(np.float32)


def at_a_site(monkeypatch: pytest.MonkeyPatch, x, y=None) -> str:
    """Return the ``dataset`` of rows, all of them test examples."""
    return table(monkeypatch, x, y, split=np.ones(len(x), bool))


def write_images(folder: Path, x, names: list[str]) -> str:
    for image, name in zip(x, names, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{name}.png")
    return f"folder:{folder}"


def test_each_form_of_data_gives_the_same_model_with_and_without_labels(
    scans, tmp_path, monkeypatch
) -> None:
    x, y = images(7)

    def plain(site: int, part: str) -> Listed:
        return Listed(coloured(x))

    def tests(site: int, part: str) -> Listed:
        return Listed(coloured(x) if part == "test" else ())

    # The names are those of sites of a run, and new data are of one site.
    plain.site_names = tests.site_names = ["a", "b"]
    flat = [f"{at:02}" for at in range(len(x))]
    by_class = [f"{label}/{name}" for label, name in zip(y, flat, strict=True)]
    mixed = [f"0/{name}" if at % 2 else name for at, name in enumerate(flat)]
    forms = {
        "with labels": write_images(tmp_path / "by-class", x, by_class),
        "folder": write_images(tmp_path / "2", x, flat),
        "mixed": write_images(tmp_path / "mixed", x, mixed),
        "plain": named(monkeypatch, plain),
        "tests": named(monkeypatch, tests),
    }
    states = {}
    for name, dataset in forms.items():
        out = tmp_path / "out" / name
        done = calibrate_run(scans, dataset, out, "all")
        assert bool(done.tests) is (name == "with labels"), name
        assert done.calibration.num_examples == 24
        states[name] = state_of(out)
    first = states["with labels"]
    trained = state_of(scans)
    changed = [key for key in first if not torch.equal(first[key], trained[key])]
    assert changed
    assert all("running" in key for key in changed)
    for name, state in states.items():
        for key, value in state.items():
            torch.testing.assert_close(value, first[key], msg=f"{name}: {key}")


def test_labels_change_only_the_verdict(scans, tmp_path, monkeypatch) -> None:
    x, y = images(3)
    found = []
    for at, labels in enumerate([None, y, 2 - y, 0 * y]):
        out = tmp_path / str(at) / "out"  # the pages name the folder
        dataset = at_a_site(monkeypatch, coloured(x), labels)
        options = {"with_predictions": True, "width": 30.0}
        done = calibrate_run(scans, dataset, out, **options)
        assert bool(done.tests) is (labels is not None)
        # Each table is a function of another module.
        name = dataset.encode()
        found.append({p.name: p.read_bytes().replace(name, b"") for p in out.iterdir()})
        about = json.loads(found[-1].pop("calibration.json"))
        assert ("labels" in about) is (labels is not None)
        page = found[-1].pop("calibration.html").decode()
        assert html.escape(about["answer"]) in page
    assert len(found[0]) == 4
    assert found == found[:1] * 4
    chosen = pd.read_csv(out / "label.csv")
    assert len(chosen) == about["examples-to-label"] < len(x)
    assert set(chosen["index"]) <= {*range(len(x))}
    assert chosen["label"].isna().all()


@pytest.mark.parametrize(
    "task", ["binary", "classification", "multi-label", "regression"]
)
def test_the_written_model_gives_the_written_predictions(
    tables,
    tmp_path,
    monkeypatch,
    task: str,
) -> None:
    """The columns of each task are in finished_runs/test_evaluate_run.py."""
    x, out = rows(30), tmp_path / "out"
    dataset = at_a_site(monkeypatch, x)
    calibrate_run(tables[task], dataset, out, "all", with_predictions=True)
    with torch.no_grad():
        outputs = load_model(out)(torch.tensor(x))
    found = pd.read_csv(out / "predictions.csv")
    classes = range(2 if task == "binary" else CLASSES)
    columns = predictions(outputs, None, TASKS[task], classes)
    assert set(columns) < set(found)
    # Without labels, the test of this model writes the same predictions.
    evaluate_run(out, dataset, tmp_path / "again")
    again = tmp_path / "again/predictions.csv"
    assert again.read_bytes() == (out / "predictions.csv").read_bytes()
    for name, values in columns.items():
        assert found[name].tolist() == pytest.approx(values, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("task", ["multi-label", "regression"])
def test_labels_without_a_verdict_give_the_figures_and_are_not_asked_for(
    tables, tmp_path, monkeypatch, task: str
) -> None:
    x = rows(30)
    dataset = at_a_site(monkeypatch, x, targets_of_tasks(x)[task])
    done = calibrate_run(tables[task], dataset, tmp_path / "out", "all")
    assert done.answer.startswith("No verdict for this task.")
    for name, text in done.tested.items():
        assert f"{name} {text}" in done.answer
    page = (tmp_path / "out/calibration.html").read_text()
    for asked in ("label.csv", "examples to label", "without labels"):
        assert asked not in page


@pytest.mark.parametrize("labelled", [True, False])
def test_the_command_reports_a_test_only_with_labels(
    labelled: bool, scans, tmp_path
) -> None:
    x, y = images(4)
    names = [
        f"{label}/{at:02}" if labelled else f"{at:02}" for at, label in enumerate(y)
    ]
    dataset, out = write_images(tmp_path / "new", x, names), tmp_path / "out"
    words = ["calibrate", scans, "--dataset", dataset, "--out", out, "--way", "mix"]
    shown = output_of(*words, "--trust")
    assert "way: mix was given" in shown
    assert ("from labels, after" in shown) is labelled
    about = json.loads((out / "calibration.json").read_text())
    assert (about["way"], about["num-examples"]) == ("mix", 24)
    page = html.unescape((out / "calibration.html").read_text())
    assert about["reason"] in page
    later = "calibrate out --way none --dataset LABELLED --out out-labelled"
    assert (later in page) is not labelled
    assert about["answer"] in page
    assert ("labels" in about) is labelled
    # The model is not sure, so its shares of classes are no estimate of the site's.
    assert about["doubt"]
    assert about["class-mix"] is None
    assert "Classes at the site" not in page
    assert "{{" not in page


def test_data_in_the_folder_of_the_run_are_warned_of(scans, tmp_path, caplog) -> None:
    dataset = config_of(scans).dataset
    calibrate_run(scans, f"{dataset}/0", tmp_path / "out", "all")
    assert "Training examples of the run may be among them" in caplog.text


def test_with_labels_a_binary_model_has_a_verdict(
    tables, tmp_path, monkeypatch
) -> None:
    x, out = rows(40), tmp_path / "out"
    y = (x[:, 0] > 2).astype(int)
    dataset = at_a_site(monkeypatch, x, y)
    done = calibrate_run(tables["binary"], dataset, out, "all", with_predictions=True)
    predicted = pd.read_csv(out / "predictions.csv")
    called = predicted["predicted-class"].to_numpy()
    assert done.tests.keys() == {"before", "after"}
    # The folder is evaluated as the folder of a run, with the same columns.
    for number, labels in enumerate((y, 1 - y)):
        later, folder = at_a_site(monkeypatch, x, labels), tmp_path / f"{number}"
        what, (test, *_) = evaluate_run(out, later, folder)
        assert what == "the global model; calibrated by all"
        accuracy = (called == labels).mean()
        assert test.result.metrics["accuracy"] == pytest.approx(accuracy)
        tested = pd.read_csv(folder / "predictions.csv")
        assert [*predicted] == [*tested.drop(columns="target")]
    verdict = done.labels.rows
    assert verdict["accuracy"][0].value == pytest.approx((called == y).mean())
    assert verdict["called positive"][0].value == pytest.approx(called.mean())
    about = json.loads((out / "calibration.json").read_text())
    assert about["labels"]["answer"] == about["answer"] == done.answer
    # The verdict names a site that is below the training sites beyond chance.
    summary = summary_of(tables["binary"])
    at_sites = summary["final"][summary["headline"]]
    _, high = interval(done.tests["after"]).ends()
    below = high is not None and high < at_sites
    assert ("below the training sites" in done.answer) is below
    # The written model has the same verdict later, from the same labels.
    again = calibrate_run(out, dataset, tmp_path / "again", "none")
    assert again.labels == done.labels
    kept = state_of(tmp_path / "again")
    assert all(value.equal(kept[name]) for name, value in state_of(out).items())
    # The columns are unlike, so the verdict without labels begins with them.
    plain = again._replace(
        labels=None, tests={}, columns=[("a", 9.0, "far"), ("b", 0.1, "")]
    )
    assert plain.answer.startswith("Undecided, and unlike the training sites in 1 of 2")


def test_the_threshold_of_the_training_sites_is_of_their_tests_that_count(
    tables, tmp_path, monkeypatch
) -> None:
    """Sites that never train and tests with batch statistics have no part in it."""
    draw, folder = np.random.default_rng(2), tmp_path / "run"
    shutil.copytree(tables["binary"], folder)
    outputs, targets = torch.tensor(draw.normal(size=(2, 6, 30))).float()
    kinds = itertools.product((None, 0, 1), ("running", BATCH))
    tests = [
        SiteTest(BINARY, *values, np.arange(30), str(client), client, bn)
        for values, (client, bn) in zip(
            zip(outputs, targets.gt(0).float(), strict=True), kinds, strict=True
        )
    ]
    save_predictions(folder, tests)
    dataset = at_a_site(monkeypatch, rows(9))
    calibrate_run(folder, dataset, tmp_path / "out", "none")
    _, found = json.loads(metadata(tmp_path / "out")["training-sites"])
    assert found == pytest.approx(threshold_of_sites([tests[2], tests[4]]))


def test_bad_input_is_refused_before_any_file_is_written(
    scans,
    tables,
    tmp_path,
    monkeypatch,
) -> None:
    """Each error names the subject and the value."""
    x, _ = images(2)
    good = write_images(tmp_path / "good", x, [f"{at:02}" for at in range(24)])
    one = write_images(tmp_path / "one", x[:1], ["0"])
    wide = table(monkeypatch, np.zeros((9, 5)))
    (tmp_path / "empty").mkdir()
    plain = {"model": "mlp", "norm": "none", "dataset": "digits"}
    run(_config(plain), tmp_path / "plain")
    own = config_of(scans).dataset
    cases = [
        (ConfigError, "way 'best'", scans, good, {"way": "best"}),
        (ConfigError, "class_moments.npz", scans, good, {"way": "matched"}),
        (ConfigError, "num-clients", scans, good, {"settings": {"num-clients": 2}}),
        (ConfigError, "width=0", scans, good, {"width": 0.0}),
        (ConfigError, "client=9", scans, good, {"client": 9}),
        (ConfigError, "digitz", scans, "digitz", {}),
        (ConfigError, "data of the run", scans, own, {}),
        (ConfigError, "(5,)", tables["binary"], wide, {}),
        (DataError, "no such folder", scans, f"folder:{tmp_path / 'absent'}", {}),
        (DataError, "no image files", scans, f"folder:{tmp_path / 'empty'}", {}),
        (DataError, "1 example", scans, one, {}),
        (NormLayerError, "no BatchNorm", tmp_path / "plain", "digits", {}),
    ]
    for kind, words, folder, dataset, options in cases:
        with pytest.raises(kind) as error:
            calibrate_run(folder, dataset, tmp_path / "out", **options)
        assert words in str(error.value), error.value
        assert not (tmp_path / "out").exists(), words
