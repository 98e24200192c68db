"""``init`` loads weights by name and shape, and reports the loaded weights."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from fedbn_flwr.doctor.state import read_state_file
from fedbn_flwr.errors import FedBNError
from fedbn_flwr.lab.models import build_model, load_initial
from fedbn_flwr.lab.models.initial import InitReport
from tests.support.trained import other_lenet

State = dict[str, torch.Tensor]


def lenet(classes: int = 10, norm: str = "batch") -> nn.Module:
    return build_model("lenet", num_classes=classes, input_shape=(1, 28, 28), norm=norm)


@pytest.fixture
def trained() -> State:
    return other_lenet()


def loaded(model: nn.Module, content: object, path: Path) -> InitReport:
    """Write a file, and load it into the model."""
    torch.save(content, path)
    return load_initial(model, str(path))


def equal(model: nn.Module, state: State) -> list[str]:
    return [
        name
        for name, value in model.state_dict().items()
        if name in state and torch.equal(value, state[name])
    ]


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "pth"])
def test_a_state_comes_back_bit_for_bit(suffix: str, tmp_path, trained) -> None:
    path = tmp_path / f"weights.{suffix}"
    if suffix == "safetensors":
        safetensors.torch.save_file(trained, path)
    else:
        torch.save(trained, path)
    model = lenet()
    report = load_initial(model, str(path))
    assert report.loaded == tuple(trained) == tuple(equal(model, trained))
    assert not report.other_shape + report.missing + report.unused


OPTIMIZER = {
    "state": {0: {"exp_avg": torch.ones(2)}},
    "param_groups": [{"lr": 0.1, "params": [0]}],
}


def renamed(state: State, prefix: str) -> State:
    return {f"{prefix}{name}": value for name, value in state.items()}


@pytest.mark.parametrize(
    ("wrap", "at", "unused"),
    [
        (lambda s: {"state_dict": s, "epoch": 3}, "state_dict", ()),
        (lambda s: {"model": renamed(s, "module.")}, "model", ()),
        (lambda s: renamed(s, "module._orig_mod."), "", ()),
        (
            lambda s: {"state_dict": {**renamed(s, "model."), "loss.a": torch.ones(3)}},
            "state_dict",
            ("loss.a",),
        ),
        (lambda s: {"net": s, "acc": 93.1, "epoch": torch.tensor(5)}, "net", ()),
        (lambda s: {"model_state": s, "optimizer": OPTIMIZER}, "model_state", ()),
        (lambda s: {"params": renamed(s, "module."), "opt": {}}, "params", ()),
        (lambda s: {"ema": s, "args": Namespace(lr=0.1)}, "ema", ()),
        (lambda s: {"model": {"w": s}, "best": np.float64(93.1)}, "model.w", ()),
    ],
)
def test_the_one_state_in_a_file_is_opened_and_named(
    wrap, at: str, unused: tuple[str, ...], tmp_path, trained
) -> None:
    """The prefixes of wrappers are taken off."""
    model = lenet()
    report = loaded(model, wrap(trained), tmp_path / "a.pt")
    assert len(equal(model, trained)) == len(trained)
    assert report.unused == unused
    assert (f"a.pt ({at}): " in str(report)) == bool(at)
    assert len(read_state_file(tmp_path / "a.pt")) == len(trained) + len(unused)


@pytest.mark.parametrize("order", [("model", "model_ema"), ("model_ema", "model")])
def test_a_file_with_two_states_says_which_was_taken(
    order: tuple[str, str], tmp_path, trained
) -> None:
    average = {name: 0 * value for name, value in trained.items()}
    states = {"model": trained, "model_ema": average}
    model = lenet()
    report = loaded(model, {key: states[key] for key in order}, tmp_path / "a.pt")
    assert len(equal(model, trained)) == len(trained)
    assert "not the other states in the file: model_ema" in str(report)


def test_another_head_stays_as_it_was_and_is_named(tmp_path, trained) -> None:
    del trained["norm2.running_var"]
    model, fresh = lenet(classes=3), lenet(classes=3).state_dict()
    content = {**trained, "aux.weight": torch.ones(2)}
    report = loaded(model, content, tmp_path / "a.pt")
    assert report.other_shape == (
        "fc.weight (10, 84) in the source, (3, 84) in the model",
        "fc.bias (10,) in the source, (3,) in the model",
    )
    assert (report.missing, report.unused) == (("norm2.running_var",), ("aux.weight",))
    assert equal(model, fresh) == ["norm2.running_var", "fc.weight", "fc.bias"]
    assert "fc.weight (10, 84) in the source, (3, 84) in the model" in str(report)


def test_batchnorm_on_one_side_has_no_place_in_another_norm(tmp_path, trained) -> None:
    """GroupNorm's gamma and beta have the names and shapes of BatchNorm's."""
    model, fresh = lenet(norm="group"), lenet(norm="group").state_dict()
    report = loaded(model, trained, tmp_path / "a.pt")
    affine = [f"norm{i}.{leaf}" for i in (1, 2) for leaf in ("weight", "bias")]
    assert list(report.missing) == affine == equal(model, fresh)
    assert report.unused == tuple(name for name in trained if name.startswith("norm"))
    back = loaded(lenet(), fresh, tmp_path / "b.pt")
    assert list(back.unused) == affine, "and back"


@pytest.mark.parametrize(
    ("init", "problem"),
    [
        ("{}/absent.pt", "absent.pt is not a file"),
        ("{}/a.onnx", r"\.safetensors"),
        ("{}/object.pt", r"torch\.save\(model\.state_dict\(\)"),
        ("{}/noise.safetensors", "cannot be read"),
        ("{}/other.pt", r"blocks\.0.*conv1\.weight"),
        ("{}/empty.pt", "contains no tensors"),
        ("{}/statistics.pt", "no parameter of the model has an entry"),
        ("{}/two.pt", r"several states: params, params_ema\..*\['params'\]"),
        ("torchvision", "is not a file"),
    ],
)
def test_what_cannot_be_loaded_is_named(
    init: str, problem: str, tmp_path, trained
) -> None:
    (tmp_path / "noise.safetensors").write_bytes(b"noise, noise, noise")
    contents = {
        "object": lenet(),
        "other": {"blocks.0": torch.ones(2)},
        "empty": {"epoch": 3},
        "statistics": {name: trained[name] for name in trained if "running" in name},
        "two": {"params": trained, "params_ema": trained},
    }
    for name, content in contents.items():
        torch.save(content, tmp_path / f"{name}.pt")
    model = lenet()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(FedBNError, match=problem):
        load_initial(model, init.format(tmp_path))
    assert len(equal(model, before)) == len(before), "the model did not change"
