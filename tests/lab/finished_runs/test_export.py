"""An exported model is the evaluated one, on its own, in every format; what does not fit is refused."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from typer.testing import CliRunner

from fedbn_flwr.checked_file import encode_safetensors
from fedbn_flwr.errors import ConfigError, EngineError, StateError
from fedbn_flwr.lab.cli import app
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.export import run_onnx, run_torch_export
from fedbn_flwr.lab.files import read_metrics
from fedbn_flwr.lab.finished_runs import export as export_module
from fedbn_flwr.lab.finished_runs.evaluate import evaluate_run
from fedbn_flwr.lab.finished_runs.export import FORMATS, SUFFIXES, export, load_exported
from fedbn_flwr.lab.finished_runs.saved_model import Choice
from fedbn_flwr.lab.output.folder import RunFolder
from fedbn_flwr.lab.output.model_description import MODEL_DESCRIPTION, ModelDescription
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData, partitioned_data
from fedbn_flwr.lab.setup import make_model
from fedbn_flwr.messages.records import to_state
from fedbn_flwr.training.evaluation import evaluate


def finished(folder: Path, old: bool = False, **settings: Any) -> tuple[Path, nn.Module, PartitionedData]:
    """A run's config and model, with statistics of data and random gamma and beta, but no training and no summary.

    With ``old`` the model's file does not say what it takes, as those of older versions.
    """
    config = Config.make({"num-clients": 2, **settings})
    model, data = make_model(config), partitioned_data(config, 2)
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            for parameter in (module.weight, module.bias):
                parameter.data.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    with torch.no_grad():
        model.train()(data.train_view().batch(torch.arange(64))[0])
    RunFolder(folder, config)
    about = {"format": "pt"} | ({} if old else {MODEL_DESCRIPTION: ModelDescription.of(config, data.dataset).to_json()})
    (folder / "model.safetensors").write_bytes(encode_safetensors(to_state(model.state_dict()), about))
    return folder, model.eval(), data


RUN: dict[str, Callable[[Path], Callable[..., torch.Tensor]]] = {
    "torch": load_exported,
    "torch-export": run_torch_export,
    "onnx": run_onnx,
}
NORMS = ("batch", "group", "wsconv", "batch-renorm")
# Each norm and each choice in each format; `make slow` does all of them.
QUICK = {
    *itertools.product(NORMS, ["torch"], [True, False]),
    *[("batch", "torch-export", False), ("wsconv", "torch-export", True)],
    *[("group", "onnx", False), ("batch-renorm", "onnx", True)],
}
ALL = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in itertools.product(NORMS, FORMATS, [True, False])
]


@pytest.mark.parametrize(("norm", "format", "fold_bn"), ALL)
def test_logits_are_those_of_the_evaluated_model(norm: str, format: Any, fold_bn: bool, tmp_path: Path) -> None:
    run, model, data = finished(tmp_path / "run", model="lenet", norm=norm)
    done = export(run, tmp_path / f"home/model{SUFFIXES[format]}", format, fold_bn=fold_bn)
    assert done.check.relative < 1e-5
    exported = RUN[format](done.file)
    for count in (1, 5):
        positions = torch.arange(count) + 7
        pixels = data.dataset.test.inputs[positions].float()
        with torch.no_grad():
            expected = model(data.test_view().batch(positions)[0])
            torch.testing.assert_close(exported(pixels), expected, rtol=0, atol=float(expected.abs().max()) * 1e-5)
    if format == "torch":
        kinds = {type(layer).__name__ for layer in exported.modules() if [*layer.parameters(recurse=False)]}
        plain = {"Conv2d", "Linear"} | ({"CheckedGroupNorm"} if norm == "group" else set())
        assert (kinds == plain) == (fold_bn or norm == "group")


@pytest.mark.parametrize("format", FORMATS)
def test_probabilities_are_the_softmax_of_the_logits(format: Any, tmp_path: Path) -> None:
    run, model, data = finished(tmp_path / "run", model="lenet")
    done = export(run, tmp_path / f"home/model{SUFFIXES[format]}", format, probabilities=True)
    with torch.no_grad():
        expected = model(data.test_view().batch(torch.arange(5))[0]).softmax(1)
    outputs = RUN[format](done.file)(data.dataset.test.inputs[:5].float())
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-6)
    assert "- outputs: float32 (N, outputs, ...), probabilities; numbers for a regression\n" in done.card.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["torchvision:resnet18", "torchvision:densenet121", "torchvision:mobilenet_v3_small"])
@pytest.mark.parametrize("format", FORMATS)
def test_models_of_torchvision(model: str, format: Any, tmp_path: Path) -> None:
    run, _, _ = finished(tmp_path / "run", model=model)
    assert export(run, tmp_path / f"home/model{SUFFIXES[format]}", format, fold_bn=True).check.relative < 1e-5


@pytest.mark.parametrize("old", [False, True])
def test_without_normalisation_it_takes_normalised_inputs(old: bool, tmp_path: Path) -> None:
    run, model, data = finished(tmp_path / "run", old)
    exported = load_exported(export(run, tmp_path / "model.safetensors", "torch", normalise=False).file)
    inputs = data.test_view().batch(torch.arange(5))[0]
    assert torch.equal(exported(inputs), model(inputs))
    whole = load_exported(export(run, tmp_path / "whole/model.safetensors", "torch").file)
    assert torch.equal(whole(data.dataset.test.inputs[:5]), model(inputs))


def test_a_client_takes_the_model_that_was_tested(quick_run, tmp_path: Path) -> None:
    _, run = quick_run(strategy="fedbn", model="lenet")
    done = export(run, tmp_path / "model.safetensors", "torch", Choice(client=1), normalise=False)
    tested = read_metrics(run / "metrics.jsonl")[-1]["clients"]["1"]
    result = evaluate(load_exported(done.file), partitioned_data(Config.load(run / "config.yaml"), 3).test_view(1))
    assert (result.loss, result.accuracy) == pytest.approx((tested["own-loss"], tested["own-accuracy"]), rel=1e-6)
    assert done.what == "the own model of client 1, with the affine, statistics, counters entries that it kept"
    with pytest.raises(ConfigError, match="client=3: the run has the clients 0 to 2"):
        export(run, tmp_path / "other/model.safetensors", "torch", Choice(client=3))
    with pytest.raises(StateError, match="eval-on=averaged-bn saves the average"):
        export(run, tmp_path / "other/model.safetensors", "torch", Choice(averaged=True))
    assert not (tmp_path / "other").exists()


def test_a_site_joins_its_part_with_the_two_files_that_it_was_sent(quick_run, tmp_path: Path) -> None:
    _, run = quick_run(strategy="silobn")
    _, other = quick_run(strategy="silobn", seed=1)
    _, group = quick_run(strategy="silobn", model="lenet")
    site, state_dir = tmp_path / "site", tmp_path / "state"
    site.mkdir()
    for name in ("config.yaml", "model.safetensors"):
        shutil.copy(run / name, site)

    def bring(source: Path, client: int) -> None:
        for path in (source / "checkpoint/clients").glob(f"*/partition-{client}"):
            shutil.copytree(path, state_dir / path.parent.name / path.name)

    def take(name: str, client: int | None = None) -> dict[str, torch.Tensor]:
        done = export(site, tmp_path / name / "model.safetensors", "torch", Choice(client, state_dir=state_dir))
        return load_exported(done.file).state_dict()

    with pytest.raises(StateError, match=r"has no file EXPERIMENT/partition-P/\*\.safetensors"):
        take("none")
    bring(other, 1)
    bring(group, 1)
    with pytest.raises(StateError) as caught:
        take("foreign")
    assert "is of another run, or of another round than the last of this one" in str(caught.value)
    assert "belongs to another model" in str(caught.value)
    bring(run, 1)
    own = export(run, tmp_path / "here/model.safetensors", "torch", Choice(client=1))
    expected = load_exported(own.file).state_dict()
    for found in (take("newest"), take("named", 1)):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    card = (tmp_path / "newest/MODEL_CARD.md").read_text()
    assert "the own model of client 1, with the statistics, counters entries that it kept" in card
    assert "summary.json is not in site" in card
    bring(run, 2)
    with pytest.raises(ConfigError, match=r"what several clients of this run kept: 1, 2\. Choose one with --client"):
        take("several")
    with pytest.raises(StateError, match="nothing that client=0 kept"):
        take("absent", 0)


def test_averaged_bn_is_exported_where_the_run_saved_it(quick_run, tmp_path: Path) -> None:
    _, run = quick_run(strategy="fedbn", **{"eval-on": "averaged-bn"})
    done = export(run, tmp_path / "model.safetensors", "torch", Choice(averaged=True))
    assert "its affine, statistics, counters entries: weighted average of the clients' latest" in done.what
    shutil.rmtree(run / "clients")  # as over a network
    with pytest.raises(StateError, match=r"client=1 kept is not here .*: export its model there, with .* --state-dir"):
        export(run, tmp_path / "other/model.safetensors", "torch", Choice(client=1))
    plain, _, _ = finished(tmp_path / "run")
    with pytest.raises(ConfigError, match="bn=averaged is for runs whose clients keep BN"):
        export(plain, tmp_path / "other/model.safetensors", "torch", Choice(averaged=True))
    with pytest.raises(StateError, match="does not say what its clients kept"):
        export(plain, tmp_path / "other/model.safetensors", "torch", Choice(state_dir=tmp_path))


def test_an_export_that_differs_leaves_no_file(tmp_path: Path, monkeypatch) -> None:
    run, model, _ = finished(tmp_path / "run")

    def wrong(path: Path) -> nn.Module:
        exported = load_exported(path)
        with torch.no_grad():
            next(exported[1].parameters()).mul_(1.001)
        return exported

    monkeypatch.setitem(export_module._LOADERS, "torch", wrong)
    with pytest.raises(EngineError, match=r"is not the evaluated one: max absolute error .* allowed 1e-04\)"):
        export(run, tmp_path / "home/model.safetensors", "torch")
    assert list((tmp_path / "home").iterdir()) == []
    state = to_state(model.state_dict())
    name = next(name for name in state if name.endswith("weight"))
    state[name] = state[name] * float("nan")
    (run / "model.safetensors").write_bytes(encode_safetensors(state, {}))
    with pytest.raises(StateError, match="not finite: it diverged"):
        export(run, tmp_path / "home/model.safetensors", "torch")


def test_without_the_data_of_the_run_random_inputs_are_used(tmp_path: Path) -> None:
    run, _, _ = finished(tmp_path / "run")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("dataset: digits", "dataset: mnist"))
    done = export(run, tmp_path / "model.safetensors", "torch")
    assert done.check.inputs == "32 random inputs, since the data of the run are not here"
    assert "so there are no counts here" in done.card.read_text()


def test_a_table_goes_in_as_it_is_and_may_be_gone(tmp_path: Path, quick_run) -> None:
    """A missing value becomes the mean; the run's own data are not needed later."""
    rows = [(30 + k % 40, "" if k % 9 == 0 else 200 + k, "xyz"[k % 3], "ab"[k % 2], int(k % 4 == 0)) for k in range(60)]
    path = tmp_path / "heart.csv"
    path.write_text("age,chol,kind,hospital,sick\n" + "\n".join(",".join(map(str, row)) for row in rows))
    own = {"dataset": f"csv:{path}", "label-column": "sick", "client-column": "hospital", "num-clients": 2}
    _, run = quick_run(strategy="fedbn", task="binary", missing="mean", **own)
    done = export(run, tmp_path / "here/model.safetensors", "torch", Choice(client=1), fold_bn=True)
    assert done.check.inputs == "12 test examples of csv:heart.csv"
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("heart.csv", "absent.csv"))
    again = export(run, tmp_path / "gone/model.safetensors", "torch", Choice(client=1), fold_bn=True)
    assert again.check.inputs.startswith("32 random inputs")
    card = again.card.read_text()
    assert "- features, in this order: age, chol, kind=x, kind=y, kind=z\n" in card
    values = "as the data hold them; NaN where a number is missing, which becomes the mean"
    values += "; a missing text is 0 in all features of its column"
    assert f"- inputs: float32 (N, 5), any number N; {values}\n" in card
    assert str(tmp_path) not in card
    inputs = torch.tensor([[50.0, float("nan"), 1, 0, 0], [50.0, 230, 1, 0, 0]])
    outputs = load_exported(done.file)(inputs)
    assert outputs.isfinite().all()
    assert torch.equal(outputs, load_exported(again.file)(inputs))
    likely = export(run, tmp_path / "p/model.safetensors", "torch", Choice(client=1), fold_bn=True, probabilities=True)
    assert torch.equal(load_exported(likely.file)(inputs), outputs.sigmoid())
    assert "- positive class: 1; the output is its probability\n" in likely.card.read_text()
    (tmp_path / "b.csv").write_text("age,chol,kind,hospital,sick\n" + "30,200,x,a,0\n40,210,w,a,1\n50,220,y,b,1\n" * 5)
    evaluated = evaluate_run(run, {"dataset": f"csv:{path}"}, "own:1", part="all")[1]
    assert evaluated[0].result.num_examples == 60
    with pytest.raises(ConfigError, match="the features of the run are age, chol, kind=x, kind=y, kind=z; those of"):
        evaluate_run(run, {"dataset": f"csv:{tmp_path / 'b.csv'}"}, "own:1", part="all")


def test_data_that_have_changed_since_the_run_are_told(tmp_path: Path, quick_run) -> None:
    """The check is of the file, so it has the run's mean and std; nobody reads counts of other data."""
    path = tmp_path / "t.csv"

    def write(count: int, factor: int, head: str = "x,y") -> None:
        path.write_text("\n".join([head, *(f"{factor * k}{',1' * head.count(',')}{k % 2}" for k in range(count))]))

    write(40, 1)
    weights = tmp_path / "weights.pt"
    own = {"dataset": f"csv:{path}", "label-column": "y", "standardise": "none", "init": str(weights)}
    torch.save(make_model(Config.make({**own, "num-clients": 3, "init": ""})).state_dict(), weights)
    _, run = quick_run(**own)
    card = export(run, tmp_path / "a/model.safetensors", "torch").card.read_text()
    assert "training examples by" in card.lower()
    assert "as the data hold them\n" in card
    assert "init: weights.pt" in card
    assert str(tmp_path) not in card
    _, run = quick_run(**{**own, "standardise": "federated"})
    write(60, 900)
    done = export(run, tmp_path / "b/model.safetensors", "torch")
    assert done.check.inputs == "12 test examples of csv:t.csv"
    assert "The data have changed since the run, so there are no counts here." in done.card.read_text()
    write(60, 1, "x,z,y")
    done = export(run, tmp_path / "c/model.safetensors", "torch")
    assert done.check.inputs == "32 random inputs, since the data have changed since the run"


def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch) -> None:
    run, _, _ = finished(tmp_path / "run")
    out = tmp_path / "model.pt2"
    out.write_text("mine")
    (tmp_path / "MODEL_CARD.md").write_text("mine")
    with pytest.raises(ConfigError) as caught:
        export(run, out, "torch")
    first, second, third = str(caught.value).split("\n")
    assert first == f"{out} is there; nothing is written over. Choose another file."
    assert second.startswith(f"{tmp_path / 'MODEL_CARD.md'} is there;")
    assert third == f"out={str(out)!r}: a file of format=torch ends in .safetensors."
    assert out.read_text() == "mine"
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxruntime" else find(name))
    for bad, why in (
        (lambda: export(run, tmp_path / "a/model.onnx", "onnx"), r"needs onnxruntime, .*'\.\[onnx\]'"),
        (
            lambda: export(tmp_path, tmp_path / "a/m.pt2", "torch-export"),
            "is no folder of a run: config.yaml is absent",
        ),
        (lambda: export(run, tmp_path / "a/m.pt", "torchscript"), "unknown format 'torchscript'"),
        (lambda: load_exported(run / "model.safetensors"), "was not written by `fedbn-flwr export --format torch`"),
    ):
        with pytest.raises(ConfigError, match=why):
            bad()
    (run / "model.safetensors").write_text("no model")
    with pytest.raises(StateError, match="cannot be read"):
        load_exported(run / "model.safetensors")
    (run / "model.safetensors").unlink()
    with pytest.raises(StateError, match="A run writes it at its end"):
        export(run, tmp_path / "a/model.pt2", "torch-export")
    assert not (tmp_path / "a").exists()


def test_the_card_says_what_it_is(quick_run, tmp_path: Path) -> None:
    summary, run = quick_run(strategy="fedbn", **{"eval-on": "personal-own,averaged-bn"})
    arguments = ["export", str(run), "--bn", "averaged", "--fold-bn", "--format", "torch"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "home/model.safetensors")])
    assert result.exit_code == 0, result.output
    assert "1 of the BatchNorm layers folded" in result.output
    card = (tmp_path / "home/MODEL_CARD.md").read_text()
    with safe_open(run / "model.safetensors", "pt") as file:
        assert file.metadata()["sha256"] == summary["sha256"]
    for text in (
        "# mlp, trained on digits with fedbn\n",
        f"SHA-256 of the run's final state: `{summary['sha256']}`",
        "- inputs: float32 or uint8 (N, 1, 28, 28), any number N; pixels 0 to 255",
        f"| personal-own-accuracy | {summary['final']['personal-own-accuracy']:.4f} | plain mean over 3 clients",
        "| client | own-accuracy | own-loss | own-num-examples |",
        "\n   all  142  146  0  146",
        "\nstrategy: fedbn\n",
    ):
        assert text in card, text
    assert str(tmp_path) not in card, "no folder of the machine that did the run"
    again = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "home/model.safetensors")])
    assert again.exit_code == 2


def test_the_card_tells_training_from_validation_examples(tmp_path: Path) -> None:
    run, _, _ = finished(tmp_path / "run", **{"validation-share": 0.2})
    card = export(run, tmp_path / "home/model.safetensors", "torch").card.read_text()
    titles = [line for line in card.splitlines() if line.endswith("one row per client:")]
    assert titles == [f"{of} examples by class, one row per client:" for of in ("Training", "Validation")]
