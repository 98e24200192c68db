"""A run's model on any data: the figures of the run on its own data, its preprocessing, its BN, and refusals."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fedbn_flwr import global_state, personal_state
from fedbn_flwr.errors import ConfigError, DataError, StateError
from fedbn_flwr.lab.cli import app
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.data import DATASETS, Subset
from fedbn_flwr.lab.data.own import own_rows
from fedbn_flwr.lab.finished_runs.evaluate import evaluate_run
from fedbn_flwr.lab.finished_runs.examples import WhereInData
from fedbn_flwr.lab.finished_runs.export import export
from fedbn_flwr.lab.finished_runs.predictions import predictions_csv
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.setup import make_model
from fedbn_flwr.training.evaluation import evaluate, without_running_statistics
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
    assert what == "the global model; on the test examples"


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
    assert [plain.statistics, adapted.statistics] == ["as saved", "re-estimated"]
    config = Config.load(run / "config.yaml")
    model, view = make_model(config), partitioned_data(config, 3).test_view()
    model.load_state_dict(global_state(run))
    # The MLP has one BN layer, so one batch with all inputs has the statistics of the two passes.
    with without_running_statistics(model):
        whole = evaluate(model, view, batch_size=len(view))
    assert adapted.result.loss == pytest.approx(whole.loss, rel=1e-5)
    assert plain.result.loss == pytest.approx(evaluate(model, view).loss, rel=1e-6) != adapted.result.loss


def test_what_does_not_fit_is_refused(fedavg, quick_run, tmp_path: Path) -> None:
    _, run = fedavg
    _, group = quick_run(norm="group", model="lenet")
    for folder, data, bn, kind, why in (
        (run, {"dataset": "digit"}, "", ConfigError, "unknown dataset 'digit'. Did you mean 'digits'"),
        (
            run,
            {"dataset": "digits", "model": "lenet", "learning-rate": 7, "partition": "iid"},
            "",
            ConfigError,
            _OTHERS,
        ),
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


_OTHERS = "model, learning-rate, partition: evaluate takes keys that describe the data .dataset, data-dir"


@pytest.mark.parametrize(
    ("task", "outputs", "targets", "lines"),
    [
        (BINARY, [[0.0], [2.0]], [1, 0], ["index,target,prediction,probability-b", "0,1,0,0.5", "1,0,1,0.880797078"]),
        (REGRESSION, [1.5, -2.0], [1.0, 0.5], ["index,target,prediction", "0,1,1.5", "1,0.5,-2"]),
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
            [[0.0, 0.0]],
            [1],
            ["index,target,prediction,probability-a,probability-b", "0,1,0,0.5,0.5"],
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_predictions_of_each_task(task: Task, outputs: list, targets: list, lines: list[str]) -> None:
    place = WhereInData("index", range(len(targets)), np.arange(len(targets)))
    text = predictions_csv({"as saved": torch.tensor(outputs)}, torch.tensor(targets), task, ("a", "b"), place)
    assert text.splitlines() == lines


def test_predictions_with_several_statistics_say_which_and_whose_they_are() -> None:
    """A column of the user's that is called as one of the file's has another name."""
    beside = {"target": ["east", "west", "west"], "patient": ["p7", "p8", "p9"]}
    place = WhereInData("row", range(3), np.array([2, 0]), beside)
    outputs = {"as saved": torch.tensor([[0.0], [2.0]]), "re-estimated": torch.tensor([[-2.0], [2.0]])}
    assert predictions_csv(outputs, torch.tensor([1, 0]), BINARY, ("a", "b"), place).splitlines() == [
        "row,target-column,patient,statistics,target,prediction,probability-b",
        "0,east,p7,as saved,0,1,0.880797078",
        "2,west,p9,as saved,1,0,0.5",
        "0,east,p7,re-estimated,0,1,0.880797078",
        "2,west,p9,re-estimated,1,0,0.119202922",
    ]


def test_adapted_predictions_stand_beside_the_saved_ones_with_patient_and_hospital(quick_run, tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    rows = [f"{k},{k * k % 7},{'ab'[k % 2]},p{k // 4},{k % 3 % 2}" for k in range(60)]
    table.write_text("\n".join(["f1,f2,hospital,patient,y", *rows]))
    columns = {"label-column": "y", "client-column": "hospital", "group-column": "patient"}
    _, run = quick_run(dataset=f"csv:{table}", **columns, **{"num-clients": 2})
    found: dict[str, list[dict[str, str]]] = {}
    for bn in ("", "adapt"):
        evaluate_run(run, {"dataset": f"csv:{table}"}, bn, "all", tmp_path / f"out-{bn}")
        with (tmp_path / f"out-{bn}/predictions.csv").open() as file:
            found[bn] = list(csv.DictReader(file))
    plain, both = found[""], found["adapt"]
    assert list(plain[0])[:4] == ["row", "hospital", "patient", "target"]
    assert [(line["hospital"], line["patient"]) for line in plain] == [("ab"[k % 2], f"p{k // 4}") for k in range(60)]
    statistics = ["as saved", "re-estimated"]
    assert [line["statistics"] for line in both] == [name for name in statistics for _ in range(60)]
    assert [{**line, "statistics": "as saved"} for line in plain] == both[:60]
    adapted = [line["probability-1"] for line in both[60:120]]
    assert adapted != [line["probability-1"] for line in plain]
    assert [line["row"] for line in both[60:120]] == [line["row"] for line in plain]


@pytest.fixture
def table(tmp_path: Path):
    """``table(name, count, columns)``: a CSV of two features, a client and a target; return its path."""

    def write(name: str, count: int = 40, labels: str = "012", split: bool = False, **more: str) -> Path:
        rows = [f"{k},{k * k % 7},{labels[k % len(labels)]}" for k in range(count)]
        extra = [f",{'ab'[k % 2]}" if more else "" for k in range(count)]
        path = tmp_path / name
        tests = [f",{int(k % 4 == 0)}" if split else "" for k in range(count)]
        head = "f1,f2,y" + (",hospital" if more else "") + (",split" if split else "")
        path.write_text("\n".join([head, *map("".join, zip(rows, extra, tests, strict=True))]) + "\n")
        return path

    return write


def test_a_table_of_a_new_place_is_evaluated_whole_and_in_its_order(quick_run, table, tmp_path: Path) -> None:
    """It lacks the column of the clients, and the last class; the rows can be joined with the predictions."""
    old, new = table("old.csv", client="hospital"), table("new.csv", 12, "01")
    own = {"dataset": f"csv:{old}", "label-column": "y", "client-column": "hospital", "num-clients": 2}
    _, run = quick_run(**own, standardise="local")
    what, (row, *_), _ = evaluate_run(run, {"dataset": f"csv:{new}"}, out=tmp_path / "out")
    assert "inputs have the mean and std of the training part of these data" in what
    assert what.endswith("; on all examples")
    assert row.result.num_examples == 12
    with (tmp_path / "out/predictions.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [line["row"] for line in found] == [str(k) for k in range(12)]
    assert [line["target"] for line in found] == [str(k % 2) for k in range(12)]
    assert json.loads((tmp_path / "out/metrics.json").read_text())["part"] == "all"
    divided = table("divided.csv", 12, "01", split=True)
    for data, part, count in ((new, "test", 2), (divided, "", 3), (divided, "all", 12)):
        split = {"split-column": "split"} if data == divided else {}
        assert evaluate_run(run, {"dataset": f"csv:{data}", **split}, part=part)[1][0].result.num_examples == count
    (whole, *_) = evaluate_run(run, {"dataset": f"csv:{old}"})[1]
    assert whole.result.num_examples < 40, "of the run's own data the test examples"
    with pytest.raises(ConfigError, match="client-column='hospital' is not a column"):
        evaluate_run(run, {"dataset": f"csv:{new}", "client-column": "hospital"})


def test_rows_of_files_and_of_several_tables_have_names(table, tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    for name in ("b", "a", "a-2"):  # a-2.csv comes before a.csv, the client a-2 after a
        table(f"sites/{name}.csv", 5)
    found = own_rows(Config.make({"dataset": f"csv:{tmp_path / 'sites'}", "label-column": "y"}).own_data())
    assert list(found.names) == [f"{name}:{k}" for name in ("a-2", "a", "b") for k in range(5)]
    for name in ("x/0.png", "x/1.png", "y/0.png", "y/2.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "images" / name)
    found = own_rows(Config.make({"dataset": f"folder:{tmp_path / 'images'}", "model": "lenet"}).own_data())
    assert (found.column, list(found.names)) == ("file", ["x/0.png", "x/1.png", "y/0.png", "y/2.png"])


def test_the_data_of_the_run_are_known_by_their_place_and_not_by_their_spelling(quick_run, table) -> None:
    path = table("old.csv")
    _, run = quick_run(dataset=f"csv:{path}", **{"label-column": "y"})
    counts = [
        evaluate_run(run, {"dataset": f"csv:{other}"})[1][0].result.num_examples
        for other in (path, f"{path.parent}/../{path.parent.name}/{path.name}", f"{path.parent}//{path.name}")
    ]
    assert counts == [counts[0]] * 3
    assert counts[0] < 40, "the test examples, not those of training"


def test_rows_that_were_trained_on_are_no_test_of_a_run_whose_data_have_changed(quick_run, table) -> None:
    """The division into training and test examples is that of all rows which are there now."""
    path = table("old.csv")
    outs = [quick_run(strategy=s, dataset=f"csv:{path}", **{"label-column": "y"})[1] for s in ("fedavg", "centralized")]
    data = {"dataset": f"csv:{path}"}
    with pytest.raises(
        ConfigError, match=r"part=test: dataset='csv:.*old.csv' has changed since the run, or is divided"
    ):
        evaluate_run(outs[0], {**data, "test-share": 0.5})
    same = path.read_text()
    head, *rows = same.splitlines()
    for changed in ([*rows, rows[0]], rows[::-1]):
        path.write_text("\n".join([head, *changed]) + "\n")
        for out in outs:
            with pytest.raises(ConfigError, match=r"part=test: dataset="):
                evaluate_run(out, data)
            assert evaluate_run(out, data, part="all")[0].endswith("on all examples")
            with pytest.raises(
                ConfigError, match=r"has changed since the run in .* began: other examples, another order"
            ):
                resumed(out)
            assert (out / "summary.json").is_file(), "a refused resume changes nothing"
    path.write_text(same)
    assert [resumed(out)["rounds"] for out in outs] == [3, 3]


def resumed(out: Path) -> dict:
    return run(Config.load(out / "config.yaml").model_copy(update={"num_server_rounds": 3, "resume": True}), out)


def test_a_run_that_goes_on_has_no_model_yet(fedavg) -> None:
    """What lies there is the model of its earlier end."""
    _, out = fedavg
    (out / "summary.json").unlink()
    with pytest.raises(
        StateError, match=r"is not finished; a model there is that of an earlier end\. Let it end: .*--resume"
    ):
        evaluate_run(out, {"dataset": "digits"})


def test_data_without_some_classes_of_the_run_are_told_the_names_that_fit(quick_run, table, tmp_path: Path) -> None:
    _, run = quick_run(dataset=f"csv:{table('old.csv', labels='012')}", **{"label-column": "y"})
    fewer = table("fewer.csv", labels="12")
    by_number = evaluate_run(run, {"dataset": f"csv:{fewer}"})[1]
    by_name = evaluate_run(run, {"dataset": f"csv:{fewer}", "class-names": "0,1,2"})[1]
    assert by_number[0].result == by_name[0].result
    with pytest.raises(ConfigError, match="are named 1, 3: give the names in the order of the numbers"):
        evaluate_run(run, {"dataset": f"csv:{table('other.csv', labels='13')}"})
    _, named = quick_run(dataset=f"csv:{table('named.csv', labels='abc')}", **{"label-column": "y"})
    with pytest.raises(ConfigError, match=r"dataset=csv:.* has 2\. .*, class-names=a,b,c names the absent ones"):
        evaluate_run(named, {"dataset": f"csv:{table('few.csv', labels='ac')}"})
    evaluate_run(named, {"dataset": f"csv:{tmp_path / 'few.csv'}", "class-names": "a,b,c"})


def test_class_names_on_one_side_only_need_their_order(quick_run, table) -> None:
    """Text in the order of the alphabet may be another order than that of the run's numbers."""
    old, new = table("old.csv"), table("new.csv", labels="cba")
    _, run = quick_run(dataset=f"csv:{old}", **{"label-column": "y"})
    with pytest.raises(ConfigError, match=r"the numbers 0 to 2, .* named a, b, c: .* class-names=a,b,c say"):
        evaluate_run(run, {"dataset": f"csv:{new}"})
    what, (row, *_), _ = evaluate_run(run, {"dataset": f"csv:{new}", "class-names": "c,b,a"}, part="all")
    assert what == "the global model; classes of the data by number: 0 = c, 1 = b, 2 = a; on all examples"
    assert row.result == evaluate_run(run, {"dataset": f"csv:{old}"}, part="all")[1][0].result
    _, named = quick_run(dataset=f"csv:{new}", **{"label-column": "y"})
    what, _, _ = evaluate_run(named, {"dataset": f"csv:{old}"})
    assert what == "the global model; classes of the run by number: 0 = a, 1 = b, 2 = c; on all examples"


def test_one_table_of_the_run_has_training_rows(quick_run, table, tmp_path: Path, caplog) -> None:
    (tmp_path / "sites").mkdir()
    for name in ("east", "west"):
        table(f"sites/{name}.csv")
    both, east = f"csv:{tmp_path / 'sites'}", f"csv:{tmp_path / 'sites/east.csv'}"
    for trained, other in ((both, east), (east, both)):
        _, run = quick_run(dataset=trained, **{"label-column": "y", "num-clients": 1, "partition": "iid"})
        for data, warned in ((trained, False), (other, True)):
            caplog.clear()
            evaluate_run(run, {"dataset": data})
            assert ("training examples of the run may be among them" in caplog.text) is warned


def test_what_reading_left_out_or_changed_is_told(quick_run, tmp_path: Path, caplog) -> None:
    head = "size,sex,y\n"
    (tmp_path / "old.csv").write_text(head + "".join(f"{k},{'FM'[k % 2]},{k % 2}\n" for k in range(40)))
    own = {"feature-columns": "size,sex:F|M", "label-column": "y"}
    _, run = quick_run(dataset=f"csv:{tmp_path / 'old.csv'}", **own, standardise="none")
    (tmp_path / "new.csv").write_text(head + "".join(f"{10**5 * k},{'FMX'[k % 3]},{k % 2}\n" for k in range(12)))
    with caplog.at_level("INFO", "flwr"):
        evaluate_run(run, {"dataset": f"csv:{tmp_path / 'new.csv'}"}, out=tmp_path / "out")
    found = json.loads((tmp_path / "out/metrics.json").read_text())
    assert found["notes"] == ["column 'sex' is text: 2 features (F, M)"]
    assert [text.split(";")[0] for text in found["warnings"]] == [
        "column 'sex': X is none of the categories that feature-columns states (F, M)",
        "inputs reach 1.1e+06 and are taken as they are: use standardise=federated",
    ]
    assert all(text in caplog.text for text in (*found["notes"], *found["warnings"]))


@pytest.mark.parametrize("held_out", ["c", "1"])
def test_held_out_clients_are_left_out_as_in_the_run(held_out: str, quick_run, tmp_path: Path) -> None:
    """Their tests have rows of their own, by group."""
    rows = [f"{k},{k * k % 7},{k % 2},{'abc'[k // 20]}" for k in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["f1,f2,y,hospital", *rows]))
    data = f"csv:{tmp_path / 't.csv'}"
    keys = {"label-column": "y", "client-column": "hospital", "partition": "natural", "num-clients": 2}
    summary, run = quick_run(dataset=data, **keys, **{"held-out-clients": held_out})
    what, (whole, *groups), _ = evaluate_run(run, {"dataset": data}, out=tmp_path / "out")
    assert what.endswith("without the held-out clients (c); on the test examples")
    assert whole.result.accuracy == summary["final"]["test-accuracy"]
    assert {row.data: row.result.num_examples for row in (whole, *groups)} == {"all": 8, "a": 4, "b": 4, "c": 4}
    assert evaluate_run(run, {"dataset": data}, part="all")[1][0].result.num_examples == 40
    with (tmp_path / "out/predictions.csv").open() as file:
        found = [(int(line["row"]), line["target"]) for line in csv.DictReader(file)]
    assert len(found) == 8
    assert all(row < 40 and target == str(row % 2) for row, target in found)
    card = export(run, tmp_path / "home/model.safetensors", "torch").card.read_text()
    assert "8 test examples, and 4 of the held-out clients (c)." in card


def test_the_positive_class_is_named(quick_run, tmp_path: Path) -> None:
    rows = [f"{k},{('yes', 'no')[k % 3 > 0]}" for k in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["x,y", *rows]))
    summary, run = quick_run(dataset=f"csv:{tmp_path / 't.csv'}", task="binary", **{"label-column": "y"})
    assert summary["definitions"]["test-f1"].endswith("; the positive class is yes")
    assert "positive" not in summary["definitions"]["test-accuracy"]
    what, _, _ = evaluate_run(run, {"dataset": f"csv:{tmp_path / 't.csv'}"}, out=tmp_path / "out")
    assert what == "the global model; the positive class is yes; on the test examples"
    assert (tmp_path / "out/predictions.csv").read_text().startswith("row,target,prediction,probability-yes\n")


def test_a_client_that_was_held_out_has_no_training_examples(quick_run, table, tmp_path: Path, caplog) -> None:
    (tmp_path / "sites").mkdir()
    for name in ("east", "north", "west"):
        table(f"sites/{name}.csv")
    keys = {"label-column": "y", "partition": "natural", "num-clients": 0, "held-out-clients": "west"}
    _, run = quick_run(dataset=f"csv:{tmp_path / 'sites'}", **keys)
    for name, warned in (("west", False), ("east", True)):
        caplog.clear()
        evaluate_run(run, {"dataset": f"csv:{tmp_path / 'sites' / name}.csv"}, part="all")
        assert ("training examples of the run may be among them" in caplog.text) is warned


def test_a_state_folder_that_is_on_this_disk_is_named(quick_run, tmp_path: Path) -> None:
    _, run = quick_run(strategy="fedbn", **{"state-dir": str(tmp_path / "state")})
    shutil.rmtree(run / "clients")
    with pytest.raises(StateError, match=f"none is in the run's folder.* add --state-dir {tmp_path / 'state'}"):
        evaluate_run(run, {"dataset": "digits"}, bn="own:0")
