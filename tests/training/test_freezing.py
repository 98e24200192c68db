"""Layers that ``train_only`` trains, and BatchNorm in the other layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedbn_flwr import train_only
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.batchnorm.train_only import moved_though_frozen as moved_in_training
from fedbn_flwr.batchnorm.train_only import trained_words
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.models import build_model
from fedbn_flwr.messages.records import to_state
from fedbn_flwr.training.freezing import (
    force_eval,
    force_eval_as_built,
    left_in_eval,
    moving_though_frozen,
    stays_in_eval,
    unlike_in_tests,
)


def lenet() -> nn.Module:
    return build_model("lenet", num_classes=10, input_shape=(1, 28, 28))


def training(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["fc"], ["fc.weight", "fc.bias"]),
        (["norm2", "fc.bias"], ["norm2.weight", "norm2.bias", "fc.bias"]),
        ([], [name for name, _ in lenet().named_parameters()]),
    ],
)
def test_paths_and_names_of_parameters(names: list[str], wanted: list[str]) -> None:
    model = lenet()
    train_only(model, names)
    assert training(model) == wanted


def test_a_path_without_parameters_names_the_nearest() -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False))
    for model, names, said in (
        (lenet(), ["norm1", "fc3"], "train_only: 'fc3' names no parameter.*Near: 'fc"),
        (lenet(), ["relu"], "'relu' names no parameter of the model"),
        (plain, ["1"], "Near: (?!.*'1')"),
    ):
        with pytest.raises(ConfigError, match=said):
            train_only(model, names)


def test_frozen_batchnorm_stays_in_eval_mode() -> None:
    for name in ("norm2", "norm2.bias"):
        model = lenet()
        train_only(model, [name, "fc"])
        for one in (model, copy.deepcopy(model)):
            one.eval()
            one.train()
            assert (one.norm1.training, one.norm2.training) == (False, True)
            assert stays_in_eval(one) == {one.norm1}


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("named", ["0", "1", "1.0"])
def test_batchnorm_below_a_name_trains_with_and_without_gamma(
    named: str, affine: bool
) -> None:
    """The name 1 selects no layer of the module 10."""
    model = nn.Sequential(*(normed(nn.Linear(3, 3)) for _ in range(11)))
    model[1][1] = nn.BatchNorm1d(3, affine=affine)
    train_only(model, [named])
    model.train()
    for path, module in model.named_modules():
        if isinstance(module, nn.BatchNorm1d):
            assert module.training == f"{path}.".startswith(f"{named}.")


def normed(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(2, 3),
        nn.BatchNorm1d(3),
        nn.Dropout(),
        nn.Sequential(nn.BatchNorm1d(3)),
        *layers,
    )


def test_batchnorm_that_a_model_has_in_eval_mode_stays_so() -> None:
    model = normed()
    model[3].eval()
    model[2].eval()
    assert list(left_in_eval(model)) == ["3.0"]
    assert "3.0" in force_eval_as_built(model)
    assert force_eval_as_built(model) == "", "the message comes once"
    for one in (model, copy.deepcopy(model)):
        one.eval()
        one.train()
        assert [module.training for module in one] == [True, True, True, True]
        assert stays_in_eval(one) == {one[3][0]}
        assert not one[3][0].training


def test_a_model_in_eval_mode_as_a_whole_and_parameters_without_gradient_say_nothing() -> (
    None
):
    for model in (normed().eval(), normed().requires_grad_(False)):
        assert force_eval_as_built(model) == ""
        assert all(module.training for module in model.train().modules())


def test_a_shared_layer_is_held_once_and_a_train_of_the_models_own_counts() -> None:
    class Own(nn.Sequential):
        def train(self, mode: bool = True) -> nn.Module:
            super().train(mode)
            self[1].eval()
            return self

    shared = nn.BatchNorm1d(3).eval()
    model = normed(shared, shared)
    assert "1 BatchNorm layer" in force_eval_as_built(model)
    own = Own(*normed())
    own.train(False)
    assert stays_in_eval(own) == {own[1]}
    trains = any(module.training for module in own.modules())
    assert not trains, "asking changes no mode"


def test_tracking_that_was_switched_off_later_is_told_and_that_of_the_layers_making_is_not() -> (
    None
):
    made = normed(nn.BatchNorm1d(3, track_running_stats=False))
    assert unlike_in_tests(made) == ""
    for path in ("1", "3.0"):
        made.get_submodule(path).track_running_stats = False
    told = unlike_in_tests(made)
    assert "2 BatchNorm" in told
    assert "(1, 3.0)" in told
    force_eval(made[1])
    told = unlike_in_tests(made)
    assert "(3.0)" in told, "a layer in eval mode trains as it is tested"


@pytest.mark.parametrize("seed", range(20))
def test_the_words_of_a_model_select_the_parameters_that_train(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    model = normed(nn.Linear(3, 3), normed(nn.Linear(3, 2)))
    for parameter in model.parameters():
        parameter.requires_grad_(bool(torch.rand(1, generator=draw) < 0.7))
    again = copy.deepcopy(model).requires_grad_(True)
    trains = {name: one.requires_grad for name, one in model.named_parameters()}
    train_only(again, trained_words(trains))
    assert training(again) == training(model)
    assert moving_though_frozen(again) == []


def test_the_layers_that_move_though_frozen_are_those_of_a_step() -> None:
    """A step of torch moves their statistics, and none of their parameters."""
    layers = [nn.BatchNorm1d(3).requires_grad_(False) for _ in range(8)]
    layers[1].weight.requires_grad_(True)
    force_eval(layers[2])
    layers[3].eval()
    layers[4].momentum = 0.0
    layers[5].momentum = None
    layers[6] = nn.BatchNorm1d(3, affine=False)
    layers[7].track_running_stats = False
    model = nn.Sequential(nn.Linear(3, 3), *layers, layers[0], nn.Linear(3, 2))
    found, before = moving_though_frozen(model), copy.deepcopy(model.state_dict())
    model(torch.randn(8, 3)).square().sum().backward()
    # The gradient of a gamma before another BatchNorm may be 0, but not its decay.
    torch.optim.SGD(model.parameters(), 1.0, weight_decay=0.1).step()
    state = model.state_dict()
    changed = {name for name in state if not torch.equal(state[name], before[name])}
    moved = []
    for path in (name.removesuffix(".running_var") for name in changed):
        own = {f"{path}.weight", f"{path}.bias"}
        if own <= state.keys() and not own & changed:
            moved.append(path)
    assert found == sorted(moved) == ["1", "6", "9"]
    for split in (split_state(model), split_state(state)):
        layers, words = moved_in_training(split, to_state(before), to_state(state))
        assert layers == found
        train_only(model.requires_grad_(True), words)
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        assert trained == changed & {n for n, _ in model.named_parameters()}
