"""An exported model equals the evaluated model in every format.

It needs no other file. Options that do not fit are refused.
"""

from __future__ import annotations

import importlib.util
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.checked_file import encode_safetensors, read_checked
from fedbn_flwr.client.personal_model import (
    client_file,
    metadata,
    personal_state,
    read_state,
    site_state,
)
from fedbn_flwr.errors import ConfigError, EngineError, StateError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.export import run_onnx, run_torch_export
from fedbn_flwr.lab.finished_runs import export as export_module
from fedbn_flwr.lab.finished_runs.export import FORMATS, SUFFIXES, export, load_exported
from fedbn_flwr.lab.finished_runs.saved_model import Choice
from fedbn_flwr.lab.output.folder import RunFolder
from fedbn_flwr.lab.output.summary import MODEL_DESCRIPTION, ModelDescription
from fedbn_flwr.lab.partitioned.partitioned_data import (
    PartitionedData,
    partitioned_data,
)
from fedbn_flwr.lab.setup import make_model
from fedbn_flwr.messages.records import to_state


def finished(folder: Path, **settings: Any) -> tuple[Path, nn.Module, PartitionedData]:
    """Write a run's config and model without training and summary.

    The model has statistics of data and random gamma and beta.
    """
    config = Config.make({"num-clients": 2, **settings})
    model, data = make_model(config), partitioned_data(config, 2)
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            for parameter in (module.weight, module.bias):
                parameter.data.copy_(
                    torch.rand(parameter.shape, generator=generator) + 0.5
                )
    with torch.no_grad():
        model.train()(data.train_view().batch(torch.arange(64))[0])
    RunFolder(folder, config)
    about = {
        "format": "pt",
        MODEL_DESCRIPTION: ModelDescription.of(config, data.dataset).to_json(),
    }
    (folder / "model.safetensors").write_bytes(
        encode_safetensors(to_state(model.state_dict()), about)
    )
    return folder, model.eval(), data


RUN: dict[str, Callable[[Path], Callable[..., torch.Tensor]]] = {
    "torch": load_exported,
    "torch-export": run_torch_export,
    "onnx": run_onnx,
}
NORMS = ("batch", "group", "wsconv")
# Each norm, and two formats; tests/lab/runs/test_signals.py has ONNX. `make slow` tests
# all combinations.
QUICK = {
    *itertools.product(NORMS, ["torch"]),
    ("batch", "torch-export"),
}
ALL = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in itertools.product(NORMS, FORMATS)
]


@pytest.mark.parametrize(("norm", "format"), ALL)
def test_logits_are_those_of_the_evaluated_model(
    norm: str, format: Any, tmp_path: Path
) -> None:
    run, model, data = finished(tmp_path / "run", model="lenet", norm=norm)
    done = export(run, tmp_path / f"home/model{SUFFIXES[format]}", format)
    assert done.check.relative < 1e-5
    exported = RUN[format](done.file)
    for count in (1, 5):
        positions = torch.arange(count) + 7
        pixels = data.dataset.test.inputs[positions].float()
        with torch.no_grad():
            expected = model(data.test_view().batch(positions)[0])
            torch.testing.assert_close(
                exported(pixels),
                expected,
                rtol=0,
                atol=float(expected.abs().max()) * 1e-5,
            )


def test_a_site_joins_its_part_with_the_two_files_that_it_was_sent(
    quick_run, tmp_path: Path
) -> None:
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
        done = export(
            site,
            tmp_path / name / "model.safetensors",
            "torch",
            Choice(client, state_dir=state_dir),
        )
        return load_exported(done.file).state_dict()

    with pytest.raises(
        StateError, match=r"has no file EXPERIMENT/partition-P/\*\.safetensors"
    ):
        take("none")
    bring(other, 1)
    bring(group, 1)
    with pytest.raises(StateError) as caught:
        take("foreign")
    assert "belongs to another run, or not to the last round of this run" in str(
        caught.value
    )
    assert "belongs to another model" in str(caught.value)
    bring(run, 1)
    own = export(run, tmp_path / "here/model.safetensors", "torch", Choice(client=1))
    expected = load_exported(own.file).state_dict()
    for found in (take("newest"), take("named", 1)):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    bring(run, 2)
    with pytest.raises(
        ConfigError,
        match=r"the local states of several clients of this run: 1, 2\. Choose one with --client",
    ):
        take("several")
    with pytest.raises(StateError, match="no local state of client=0"):
        take("absent", 0)


def test_averaged_bn_is_exported_where_the_run_saved_it(
    quick_run, tmp_path: Path
) -> None:
    _, run = quick_run(strategy="fedbn", **{"eval-on": "averaged-bn"})
    done = export(run, tmp_path / "model.safetensors", "torch", Choice(averaged=True))
    assert (
        "its affine, statistics, counters entries: weighted average of the clients'"
        " latest" in done.what
    )
    shutil.rmtree(run / "clients")  # as over a network
    with pytest.raises(
        StateError,
        match=(
            r"the local state of client=1 is not here .*: export its model there, with"
            r" .* --state-dir"
        ),
    ):
        export(run, tmp_path / "other/model.safetensors", "torch", Choice(client=1))
    plain, _, _ = finished(tmp_path / "run")
    with pytest.raises(
        ConfigError, match="bn=averaged is for runs with BN kept by the clients"
    ):
        export(
            plain, tmp_path / "other/model.safetensors", "torch", Choice(averaged=True)
        )
    with pytest.raises(StateError, match="names no local state of its clients"):
        export(
            plain,
            tmp_path / "other/model.safetensors",
            "torch",
            Choice(state_dir=tmp_path),
        )


def test_an_export_that_differs_leaves_no_file(tmp_path: Path, monkeypatch) -> None:
    run, model, _ = finished(tmp_path / "run")

    def wrong(path: Path) -> nn.Module:
        exported = load_exported(path)
        with torch.no_grad():
            next(exported[1].parameters()).mul_(1.001)
        return exported

    monkeypatch.setitem(export_module._LOADERS, "torch", wrong)
    with pytest.raises(
        EngineError,
        match=r"differs from the evaluated model: max absolute error .* allowed 1e-04\)",
    ):
        export(run, tmp_path / "home/model.safetensors", "torch")

    def wrong_in_its_last_batch(path: Path) -> nn.Module:
        exported, batches = load_exported(path), list[int]()

        def last(module: nn.Module, inputs: object, outputs: torch.Tensor) -> object:
            batches.append(len(outputs))
            return outputs * float("nan") if len(batches) > 1 else outputs

        exported.register_forward_hook(last)
        return exported

    monkeypatch.setitem(export_module._LOADERS, "torch", wrong_in_its_last_batch)
    with pytest.raises(EngineError, match="max absolute error nan"):
        export(run, tmp_path / "home/model.safetensors", "torch")
    assert list((tmp_path / "home").iterdir()) == []
    state = to_state(model.state_dict())
    name = next(name for name in state if name.endswith("weight"))
    state[name] = state[name] * float("nan")
    about = metadata(run)
    (run / "model.safetensors").write_bytes(encode_safetensors(state, about))
    with pytest.raises(StateError, match="not finite, since it diverged"):
        export(run, tmp_path / "home/model.safetensors", "torch")


def test_without_the_data_of_the_run_random_inputs_are_used(tmp_path: Path) -> None:
    run, _, _ = finished(tmp_path / "run")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("dataset: digits", "dataset: mnist"))
    done = export(run, tmp_path / "model.safetensors", "torch")
    assert (
        done.check.inputs == "32 random inputs, since the data of the run are not here"
    )
    pixels, _ = export_module._inputs(export_module.load_model(run, Choice()))
    assert pixels.unique().tolist() == [*range(256)], "the values of image files"


def test_bad_input_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch
) -> None:
    run, _, _ = finished(tmp_path / "run")
    there, model = tmp_path / "model.pt2", run / "model.safetensors"
    there.write_text("mine")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: None if name == "onnxruntime" else find(name),
    )
    new = tmp_path / "a"
    for source, out, format, named in (
        (run, there, "torch", r"already exists(?s:.*)ends in \.safetensors"),
        (run, new / "model.onnx", "onnx", r"\[onnx\]"),
        (tmp_path, new / "m.pt2", "torch-export", "not the folder of a run"),
        (run, new / "m.pt", "torchscript", "torchscript"),
    ):
        with pytest.raises(ConfigError, match=named):
            export(source, out, format)
    assert there.read_text() == "mine"
    with pytest.raises(ConfigError, match="was not written by"):
        load_exported(model)
    state, about = read_state(model)
    save_file(state, model, {**about, "what": "a model", "folded": "{}"})
    with pytest.raises(ConfigError, match=r"with --fold-bn\..*--format onnx"):
        load_exported(model)
    model.write_text("no model")
    with pytest.raises(StateError, match="cannot be read"):
        load_exported(model)
    model.unlink()
    with pytest.raises(StateError, match="A run writes it at its end"):
        export(run, new / "model.pt2", "torch-export")
    assert not new.exists()


def test_the_data_may_be_gone(tmp_path: Path, quick_run) -> None:
    path = tmp_path / "rows.npz"
    draw = np.random.default_rng(0)
    rows = draw.normal(3, 2, (60, 5)).astype(np.float32)
    np.savez(path, x=rows, y=draw.integers(0, 2, 60), client=np.arange(60) % 3)
    _, run = quick_run(
        strategy="fedbn", model="mlp", task="binary", dataset=f"npz:{path}"
    )
    done = export(
        run,
        tmp_path / "here/model.safetensors",
        "torch",
        Choice(client=1),
    )
    assert done.check.inputs == "12 test examples of npz:rows.npz"
    path.unlink()
    again = export(
        run,
        tmp_path / "gone/model.safetensors",
        "torch",
        Choice(client=1),
    )
    assert (
        again.check.inputs == "32 random inputs, since the data of the run are not here"
    )
    outputs = load_exported(again.file)(torch.from_numpy(rows))
    assert torch.equal(load_exported(done.file)(torch.from_numpy(rows)), outputs)


@pytest.mark.parametrize("eval_on", ["personal-own", "averaged-bn"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_site_has_what_it_keeps_whatever_the_shared_file_has(
    quick_run, eval_on: str, whole: bool
) -> None:
    _, run = quick_run(strategy="fedbn", **{"eval-on": eval_on})
    file, shared = run / "model.safetensors", read_state(run / "model.safetensors")[0]
    kept = [read_state(client_file(run, client))[0] for client in range(3)]
    if whole:
        every = {**{name: torch.ones_like(e) for name, e in kept[0].items()}, **shared}
        save_file(every, file, dict(metadata(run)))
        shared = every
    assert (kept[0].keys() <= shared.keys()) == (whole or eval_on == "averaged-bn")
    state_dir = run / "checkpoint/clients"
    for client in range(3):
        path = max(state_dir.glob(f"*/partition-{client}/*.safetensors"))
        content = read_checked(path)
        found = [
            personal_state(run, client),
            site_state(run, state_dir, content["fingerprint"], client).state,
        ]
        for state in found:
            assert state.keys() == {**shared, **kept[client]}.keys()
            for name, value in state.items():
                wanted = kept[client].get(name, shared.get(name))
                assert torch.equal(value, wanted), name
        for name, array in content["kept"]["fedbn-flwr.local"].items():
            assert np.array_equal(kept[client][name].numpy(), array), name
