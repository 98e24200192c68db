"""``train_only``: the named layers train; what that means for BatchNorm in the others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.models import build_model
from fedbn_flwr.strategies.fixbn import FreezeBN
from fedbn_flwr.training.freezing import FrozenBN, holds_eval, train_only


def lenet() -> nn.Module:
    return build_model("lenet", num_classes=10, input_shape=(1, 28, 28))


def training(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["fc3"], ["fc3.weight", "fc3.bias"]),
        (["norm2", "fc3.bias"], ["norm2.weight", "norm2.bias", "fc3.bias"]),
        ([], [name for name, _ in lenet().named_parameters()]),
    ],
)
def test_paths_and_names_of_parameters(names: list[str], wanted: list[str]) -> None:
    model = lenet()
    train_only(model, names)
    assert training(model) == wanted


def test_prefixes_end_at_dots() -> None:
    model = build_model("resnet20", num_classes=10, input_shape=(3, 32, 32))
    train_only(model, ["layer3.2"])
    assert {name.rpartition(".")[0] for name in training(model)} == {
        f"layer3.2.{name}" for name in ("conv1", "norm1", "conv2", "norm2")
    }
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
    train_only(model, ["1"])
    assert training(model) == ["1.weight", "1.bias"], "not those of 10 and 11"


def test_a_path_without_parameters_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"train-only: 'fc' names no parameter.*Did you mean 'fc3'\?"):
        train_only(lenet(), ["norm1", "fc"])
    with pytest.raises(ConfigError, match=r"'relu' names no parameter of the model"):
        train_only(lenet(), ["relu"])


@pytest.mark.parametrize("frozen_bn", ["eval", "train"])
def test_frozen_batchnorm_stays_in_its_mode(frozen_bn: FrozenBN) -> None:
    model = lenet()
    train_only(model, ["norm2", "fc3"], frozen_bn)
    for one in (model, copy.deepcopy(model)):
        one.eval()
        one.train()
        assert (one.norm1.training, one.norm2.training) == (frozen_bn == "train", True)
        assert holds_eval(one.norm1) == (frozen_bn == "eval")
        assert not holds_eval(one.norm2)


def test_fixbn_gives_it_back_as_it_was() -> None:
    model = lenet()
    train_only(model, ["norm2", "fc3"])
    model.train()
    hook = FreezeBN(affine=True)
    hook.begin(model)
    model.train()
    assert (model.norm1.training, model.norm2.training) == (False, False)
    assert training(model) == ["fc3.weight", "fc3.bias"]
    hook.end(model)
    assert (model.norm1.training, model.norm2.training) == (False, True)
    model.train()
    assert (model.norm1.training, model.norm2.training) == (False, True)
    assert training(model) == ["norm2.weight", "norm2.bias", "fc3.weight", "fc3.bias"]


def test_a_group_norm_has_no_mode_to_keep() -> None:
    model = build_model("lenet", num_classes=10, input_shape=(1, 28, 28), norm="group")
    train_only(model, ["fc3"])
    assert all(module.training for module in model.train().modules())
    assert model(torch.zeros(2, 1, 28, 28)).requires_grad
