"""A run's model is evaluated on any data.

On the run's own data, the figures are the run's. Preprocessing, BN and refusals are
tested.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedbn_flwr.errors import ConfigError, DataError, StateError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.data import DATASETS, OwnData, Subset, own_data
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data
from fedbn_flwr.lab.results.evaluate import evaluate_run
from fedbn_flwr.lab.results.folder import trusting
from fedbn_flwr.lab.results.new_data import (
    as_csv,
    overlap,
    predictions,
    read_new_data,
    refuse_unfit,
)
from fedbn_flwr.lab.results.saved_model import Choice, saved_model
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.studies.one_run import changed
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.tasks import (
    BINARY,
    CLASSIFICATION,
    MULTI_LABEL,
    REGRESSION,
    Task,
)
from tests.support.commands import call, output_of
from tests.support.pixels import DATA as SEGMENTATION
from tests.support.runs import QUICK, config_of, model_of
from tests.support.tables import in_places, write_images


def test_on_the_runs_own_data_the_figures_are_those_of_the_run(
    quick_run, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    summary, run = quick_run(**{"num-server-rounds": 4, "learning-rate": 0.3})
    words = ["evaluate", run, "--dataset", "digits", "--out", tmp_path / "out"]
    shown = output_of(*words)
    assert "model: the global model" in shown
    found = json.loads((tmp_path / "out/metrics.json").read_text())
    (row,) = found["results"]
    assert row["accuracy"] == summary["final"]["test-accuracy"]
    assert row["loss"] == pytest.approx(summary["final"]["test-loss"], rel=1e-6)
    assert f" {100 * row['accuracy']:.1f}" in shown
    (warning,) = found["warnings"]
    assert "is the data set of the run" in warning
    predicted = pd.read_csv(tmp_path / "out/predictions.csv")
    assert len(predicted) == row["examples"] == 359
    scores = [f"probability-{k}" for k in range(10)]
    about = ["index", "target", "predicted-class", "prediction"]
    assert [*predicted] == [*about, *scores]
    right = predicted["target"] == predicted["prediction"]
    assert right.mean() == pytest.approx(row["accuracy"])
    assert call(*words).exit_code == 2, "nothing is written over"


@pytest.mark.parametrize("model", ["mlp", "lenet"])
def test_other_data_get_the_shape_and_the_normalisation_of_those_of_the_run(
    quick_run, model: str
) -> None:
    """LeNet takes any number of channels, and here grey images become coloured."""
    _, run = quick_run(model=model)
    other = Config.make({"dataset": "digits-domains", "partition": "iid"})
    model, ours = model_of(run), partitioned_data(config_of(run), 3).dataset
    theirs = partitioned_data(other, 1, (1, 28, 28)).dataset
    assert theirs.mean != ours.mean
    expected = evaluate(model, Subset(theirs.test, None, mean=ours.mean, std=ours.std))
    found = evaluate_run(run, "digits-domains")[1][0].result
    assert (found.loss, found.metrics["accuracy"]) == pytest.approx(
        (expected.loss, expected.metrics["accuracy"]), rel=1e-6
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with the run ``batch``."""
    folder = tmp_path_factory.mktemp("runs")
    run(Config.make({**QUICK, "num-server-rounds": 1}), folder / "batch")
    return folder


READS = {
    # The arguments of the command, and the keys whose modules it imports with trust.
    "report": ((".",), "dataset model"),
    "evaluate": ((".",), "dataset model"),
    "evaluate --against": ((".", "--against", "."), "dataset model"),
    "evaluate --dataset": ((".", "--dataset", "digits"), "dataset model"),
    "calibrate": ((".", "--dataset", "digits", "--out", "new"), "model"),
    "doctor": ((".",), "dataset model loop"),
}


@pytest.mark.parametrize("key", ["dataset", "model", "loop", "partition", "task"])
@pytest.mark.parametrize("command", READS)
def test_a_run_of_somebody_else_runs_no_code_without_trust(
    runs, tmp_path, monkeypatch, command: str, key: str
) -> None:
    """Its settings and the description of its model name a module in its folder."""
    given, needs = READS[command]
    folder, name = tmp_path / "run", f"evil_{tmp_path.name.rpartition('-')[2]}"
    shutil.copytree(runs / "batch", folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings[key] = f"{name}:data"
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    model = folder / "model.safetensors"
    if key == "model":
        with safe_open(model, "pt") as opened:
            about = opened.metadata()
        build = json.loads(about["interface"])
        build["build"]["name"] = settings[key]
        about["interface"] = json.dumps(build)
        save_file(load_file(model), model, about)
    (folder / f"{name}.py").write_text("open('RAN', 'w')\ndef data(): pass")
    assert changed(Config.make(QUICK), folder), "a sweep into the folder reads it"
    assert [*map(trusting, (folder, runs / "batch"))] == [["--trust"], []]
    for more in ([], ["--trust"]):
        call(command.split()[0], *given, *more)
        assert (folder / "RAN").exists() == bool(
            more and key in f"{needs} partition"
        ), more


def damaged(folder: Path, name: str) -> None:
    """Damage a file of a run."""
    model, summary = folder / "model.safetensors", folder / "summary.json"
    if name == "pickle":
        return torch.save({}, model)
    if name in ("task", "sites"):
        content = json.loads(summary.read_text())
        content |= {"task": "nonsense"} if name == "task" else {"sites": [{}]}
        summary.write_text(json.dumps(content))
    if name == "long":
        text = (folder / "config.yaml").read_text()
        long = text.replace("strategy: ", "strategy: " + "y" * 5_000_000)
        (folder / "config.yaml").write_text(long)
    state = load_file(model)
    if name == "nan":
        state["fc.weight"][0] = torch.nan
    if name == "lacks":
        state.popitem()
    with safe_open(model, "pt") as opened:
        save_file(state, model, opened.metadata())
    return None


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("nan", 0, "has NaN or infinite values"),
        ("lacks", 0, "do not fit model="),
        ("pickle", 0, "cannot be read"),
        ("task", 1, "is damaged: KeyError"),
        ("sites", 1, "is damaged: KeyError"),
        ("long", 0, "characters"),
    ],
)
def test_a_damaged_run_is_named(
    runs, tmp_path, name: str, code: int, said: str
) -> None:
    """The table of the sites is printed, with a warning about the saved model."""
    shutil.copytree(runs / "batch", tmp_path / "run")
    damaged(tmp_path / "run", name)
    done = call("evaluate", tmp_path / "run")
    assert (done.exit_code, done.exception is None) == (code, code == 0)
    assert said in done.output
    assert len(done.output) < 5000


FOLDERS = {
    "another name": (["a", "b", "c_new"], ["c_new"]),
    "another case": (["A", "B", "C"], ["A, B, C"]),
    "a site": (["x/a", "x/b", "x/d"], ["d"]),
    "beside the folders": (["a", "b", ""], ["new"]),
    "classes": (["a", "c"], []),
    "no folders": ([""], []),
}


@pytest.mark.parametrize("layout", FOLDERS)
def test_folders_that_are_no_classes_of_a_finished_model_are_named(
    tmp_path, caplog, layout: str
) -> None:
    files, named = FOLDERS[layout]
    dataset = write_images(tmp_path / "new", dict.fromkeys(files, 1))
    kind, path = OwnData.parse(dataset)
    known = {"num_classes": 3, "known_classes": ("a", "b", "c")}
    own_data(OwnData(kind, path, "classification", **known))
    assert len(caplog.messages) == len(named)
    for words, said in zip(named, caplog.messages, strict=True):
        assert f": {words}. Its classes: a, b, c." in said


@pytest.mark.parametrize(
    ("of", "dataset", "more", "code", "named"),
    [
        ("batch", "digit", {}, "unknown-name", "'digits'"),
        ("batch", "digits", {"settings": {"model": "lenet"}}, "config", "model: "),
        ("batch", SEGMENTATION["dataset"], {}, "data", "classification"),
        ("batch", "usps", {}, "data", "data-dir"),
        ("batch", "digits", {"client": 7}, "config", "0 to 2"),
        ("absent", "digits", {}, "config", "not the folder of a run"),
        ("batch", "of-9", {}, "config", "10 classes, but dataset=of-9 has 9"),
        ("batch", "of-12", {}, "config", "10 classes, but dataset=of-12 has 12"),
    ],
)
def test_what_does_not_fit_is_refused(
    runs,
    of: str,
    dataset: str,
    more,
    code: str,
    named: str,
    monkeypatch,
) -> None:
    for count in (9, 12):
        info = dataclasses.replace(DATASETS["digits"], num_classes=count)
        monkeypatch.setitem(DATASETS, f"of-{count}", info)
    with pytest.raises((ConfigError, DataError), match=named) as caught:
        evaluate_run(runs / of, dataset, **more)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("task", "outputs", "targets", "lines"),
    [
        (
            BINARY,
            [[0.0], [2.0]],
            [1, 0],
            [
                "index,target,predicted-class,prediction,probability-b",
                "0,1,a,0,0.5",
                "1,0,b,1,0.880797078",
            ],
        ),
        (
            REGRESSION,
            [1.5, -2.0],
            [1.0, 0.5],
            ["index,target,prediction", "0,1,1.5", "1,0.5,-2"],
        ),
        (
            MULTI_LABEL,
            [[0.0, 2.0]],
            [[1.0, float("nan")]],
            [
                "index,target-a,target-b,prediction-a,prediction-b,probability-a,probability-b",
                "0,1,nan,0,1,0.5,0.880797078",
            ],
        ),
        (
            CLASSIFICATION,
            [[0.0, 2.0]],
            [0],
            [
                "index,target,predicted-class,prediction,probability-a,probability-b",
                "0,0,b,1,0.119202922,0.880797078",
            ],
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_predictions_of_each_task(
    task: Task, outputs: list, targets: list, lines: list[str]
) -> None:
    given = torch.tensor(outputs), torch.tensor(targets)
    columns = predictions(*given, task, ("a", "b"))
    assert as_csv({"index": range(len(targets)), **columns}).splitlines() == lines


def test_data_of_a_new_place_are_evaluated_whole_and_in_their_order(
    quick_run, tmp_path
) -> None:
    """The order allows joining the files with the predictions."""
    old = write_images(tmp_path / "old", in_places(6, "a", "b"))
    folders = in_places(3, "a", "b")
    new = write_images(tmp_path / "new", folders)
    _, run = quick_run(dataset=old, model="mlp", **{"num-clients": 2})
    _, (row, *_) = evaluate_run(run, new, tmp_path / "out")
    assert row.result.num_examples == 12
    found = pd.read_csv(tmp_path / "out/predictions.csv")
    files = [f"{folder}/{at}.png" for folder in folders for at in range(3)]
    assert [*found["file"]] == files
    assert [*found["target"]] == ([0] * 3 + [1] * 3) * 2
    assert [*found["client"]] == ["a"] * 6 + ["b"] * 6
    # A site may have the name of the row of all examples.
    parts = in_places(2, "all/train", "b/train") | in_places(1, "all/test", "b/test")
    divided = write_images(tmp_path / "divided", parts)
    assert evaluate_run(run, divided).rows[0].result.num_examples == 4
    # Training examples are among the data of the run, however the path is spelled.
    for way in ("", f"/../{tmp_path.name}", "/"):
        with pytest.raises(ConfigError, match="are the data of the run"):
            evaluate_run(run, f"folder:{tmp_path}{way}/old")
    # The sites of the run are evaluated from its predictions.
    shown = output_of("evaluate", run)
    shutil.rmtree(tmp_path / "old")
    assert output_of("evaluate", run) == shown


def test_each_output_of_a_model_has_a_name(quick_run) -> None:
    """The model may have more outputs than the data have classes."""
    _, run = quick_run(**{"num-classes": 12})
    found = read_new_data(saved_model(run, Choice()), "digits", {})
    assert found.classes == tuple(map(str, range(12)))


def test_a_run_whose_data_have_changed_is_not_resumed(quick_run, tmp_path) -> None:
    """Training and test examples are divided again over the present images."""
    dataset = write_images(tmp_path / "old", {"x": 12, "y": 12})
    settings = {"dataset": dataset, "model": "mlp", "num-clients": 2}
    _, out = quick_run(**settings)
    longer = Config.load(out / "config.yaml", ["num-server-rounds=3", "resume=true"])
    last = tmp_path / "old/y/11.png"
    content = last.read_bytes()
    last.unlink()
    with pytest.raises(
        ConfigError, match=r"has changed since the run in .* began: other examples"
    ):
        run(longer, out)
    assert (out / "summary.json").is_file(), "a refused resume changes nothing"
    last.write_bytes(content)
    assert run(longer, out)["rounds"] == 3


@pytest.mark.parametrize(
    ("given", "overlaps"),
    [
        ("folder:/data/run", True),
        ("folder:/data/run/part", True),
        ("folder:/data", True),
        ("folder:/data/other", False),
        ("folder:/data/run-2", False),
        ("digits", False),
    ],
)
def test_data_in_or_around_the_folder_of_the_runs_are_warned_of(
    given: str, overlaps: bool
) -> None:
    assert bool(overlap("folder:/data/run", given)) is overlaps


def test_a_run_that_goes_on_has_no_model_yet(quick_run) -> None:
    """A model in its folder is from an earlier end."""
    _, out = quick_run()
    (out / "summary.json").unlink()
    with pytest.raises(
        StateError,
        match=r"is not finished, so a model there is .* end\. Finish it: .*--resume",
    ):
        evaluate_run(out, "digits")


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 16, 16), (1, 8, 9), (64,)])
def test_data_of_another_shape_than_the_runs_are_refused(shape) -> None:
    """A network with global pooling would run on images of any size."""
    taken = SimpleNamespace(shape=(1, 8, 8))
    same, other = (
        SimpleNamespace(test=SimpleNamespace(shape=one)) for one in (taken.shape, shape)
    )
    refuse_unfit(taken, same, "own")
    with pytest.raises(ConfigError, match="the model takes inputs"):
        refuse_unfit(taken, other, "own")
