"""The training loop against loops written out by hand, in float64."""

from __future__ import annotations

import copy
import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.errors import ConfigError, DataError, NormLayerError
from fedbn_flwr.strategies.fixbn import FreezeBN
from fedbn_flwr.training import (
    ClientHook,
    LearningRate,
    LocalTraining,
    TrainResult,
    train,
)
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.randomness import torch_generator
from fedbn_flwr.training.tasks import CLASSIFICATION
from tests.support.points import Points
from tests.support.strange_layers import Ghost, settings_of


def stream(purpose: str) -> torch.Generator:
    return torch_generator(11, purpose)


def settings(**changes) -> LocalTraining:
    return LocalTraining(learning_rate=LearningRate(0.1), **changes)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"weight_decay": math.nan}, "bad-value"),
        ({"local_epochs": 0}, "no-local-step"),
        ({"optimizer": "lbfgs"}, "unknown-name"),
        ({"optimizer": "adam", "sgd_momentum": 0.9}, "no-effect"),
        ({"loop": print, "amp": True}, "no-effect"),
    ],
)
def test_settings_without_a_training_or_an_effect_are_refused(wrong, code) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(**wrong)
    assert caught.value.code == code


def run(model: nn.Module, data, rate: float = 0.1, **changes) -> TrainResult:
    given = {name: changes.pop(name) for name in ("hooks", "task") if name in changes}
    return train(
        model, data, settings(**changes), learning_rate=rate, stream=stream, **given
    )


def same(a: nn.Module, b: nn.Module, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(
        a.state_dict(), b.state_dict(), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("field", ["loss", "training_loss"])
def test_the_parameters_of_a_loss_train_in_the_model_or_are_refused(
    points, mlp, field: str
) -> None:
    """Otherwise nobody trains or averages them, and their gradients add up."""
    model, scale = mlp(), nn.Parameter(torch.ones(3, dtype=torch.float64))
    own = {field: lambda outputs, targets: F.cross_entropy(outputs * scale, targets)}
    task = replace(CLASSIFICATION, **own)
    with pytest.raises(ConfigError, match=r"\(3,\) that is not in the model"):
        run(model, points(8), task=task)
    run(model, points(8), task=replace(task, **{field: nn.CrossEntropyLoss()}))
    model.register_parameter("scale", scale)
    run(model, points(8), task=task)
    assert scale.detach().ne(1).all()


def test_learning_rate_over_rounds() -> None:
    rate = LearningRate(1.0, (2, "freeze", 4), (0.5, 0.1, 0.25))
    assert [rate.at(r) for r in (1, 2, 3, 4, 5)] == [1.0, 1.0, 0.5, 0.5, 0.125]
    assert [rate.at(r, frozen=True) for r in (2, 3)] == [0.1, 0.05]
    constant = LocalTraining(learning_rate=0.1)
    assert constant == LocalTraining(learning_rate=LearningRate(0.1))
    for bad in (0.0, -1.0, math.nan, math.inf, None, "0.1"):
        for made in (LearningRate, lambda rate: LocalTraining(learning_rate=rate)):
            with pytest.raises(ConfigError, match="must be a finite number above 0"):
                made(bad)
    for after, factor in ((0.5, 0.1), ("freez", 0.1), (-1, 0.1), (2, -1.0), (2, 0.0)):
        with pytest.raises(ConfigError, match="the learning rate"):
            LearningRate(0.1, (after,), (factor,))


NUMBERS = [f.name for f in fields(LocalTraining) if type(f.default) in (int, float)]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_has_the_type_of_its_default_or_is_refused_by_name(name: str) -> None:
    kind = type(getattr(LocalTraining, name))
    made = getattr(settings(**{name: np.float64(2)}), name)
    assert (made, type(made)) == (2, kind)
    for bad in (-1, math.nan, math.inf, None, "2", *[2.5] * (kind is int)):
        with pytest.raises(ConfigError, match=f"{name}={bad!r} must be"):
            settings(**{name: bad})


def test_the_last_pass_ends_with_the_last_step() -> None:
    loop = settings(local_steps=4, batch_size=4, sampling="without-replacement")
    assert len([*loop.batches(10, stream("batches"))]) == 4


def test_a_batch_in_which_no_target_counts_has_no_loss(points, mlp) -> None:
    """Torch's mean over no target is NaN.

    The losses of the other batches are counted as before, in training and in tests.
    """
    data = points(12)
    data.targets[8:] = -100
    found = evaluate(mlp(), data, batch_size=4)
    data = points(12)
    expected = Points(data.inputs[:8], data.targets[:8]).loss(mlp().eval()).item()
    assert (found.loss, found.num_examples) == (pytest.approx(expected, rel=1e-14), 8)
    _, empty, _ = settings(batch_size=4).batches(12, stream("batches"))
    data.targets[empty] = -100
    trained = run(mlp(), data, batch_size=4)
    assert math.isfinite(trained.loss)
    assert trained.num_processed == 12


class OfImages(nn.Module):
    """A network whose BatchNorm sees maps."""

    def __init__(self, features: int, order: int = 1) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm2d(1), nn.Linear(features, 3)
        self.order = order


class OnlyInTraining(OfImages):
    """A network whose BatchNorm normalises in training only."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) if self.training else x
        return self.last(torch.dropout(x, 0.1, self.training).flatten(1))


class CalledTwice(OfImages):
    """A network whose BatchNorm sees a 2 x 2 map and its mean, in either order."""

    def forward(self, x: Tensor) -> Tensor:
        sizes = [x, x.mean((2, 3), keepdim=True)][:: self.order]
        return self.last(torch.cat([self.norm(one).flatten(1) for one in sizes], 1))


def with_norm(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), norm, nn.Linear(4, 3))


NO_STATISTICS = nn.BatchNorm1d(4, track_running_stats=False)
ONE_IMAGE = {"shape": (1, 2, 2)}
TAKES = {
    # The model, the shape of its inputs, and whether it takes a batch of one.
    "no norm": (with_norm(nn.Identity()), {}, True),
    "frozen": (with_norm(nn.BatchNorm1d(4)), {}, True),
    "no statistics": (with_norm(NO_STATISTICS), {}, False),
    "frozen, no statistics": (with_norm(NO_STATISTICS), {}, False),
    "the map first": (CalledTwice(5), ONE_IMAGE, False),
    "the mean first": (CalledTwice(5, -1), ONE_IMAGE, False),
    "only in training": (OnlyInTraining(4), ONE_IMAGE, True),
    "only in training, one pixel": (OnlyInTraining(1), {"shape": (1, 1, 1)}, False),
}


@pytest.mark.parametrize("case", TAKES)
def test_a_norm_that_sees_one_value_in_any_of_its_calls_takes_no_batch_of_one(
    points, case: str
) -> None:
    """Finding out changes no statistics and no generator."""

    class Freeze(ClientHook):
        def begin(self, model: nn.Module) -> None:
            model[1].eval()

    model, shape, takes = TAKES[case]
    model, data = copy.deepcopy(model).double(), points(5, **shape)
    hooks = {"freeze": Freeze()} if "frozen" in case else {}
    state = torch.get_rng_state()
    assert run(model, data, batch_size=4, hooks=hooks).num_dropped == 1 - takes
    assert torch.equal(torch.get_rng_state(), state)
    if "only" in case:
        assert model.norm.num_batches_tracked == 1 + takes


def test_nothing_to_train_on(points, mlp) -> None:
    for count, size, error, said in (
        (
            0,
            4,
            DataError,
            "^no training examples: leave this client out or give it data$",
        ),
        (3, 1, ConfigError, "use a batch-size above 1, or another norm"),
        (
            1,
            4,
            DataError,
            "has one training example, .* give it more examples, leave it",
        ),
    ):
        with pytest.raises(error, match=said):
            run(mlp(), points(count), batch_size=size)
    assert run(mlp(norm=False), points(3), batch_size=1).num_steps == 3


class Noted(ClientHook):
    """A hook that adds half the squared norm of the parameters and records calls."""

    def __init__(self, model: nn.Module) -> None:
        self.initial = copy.deepcopy(model)
        self.calls = []

    def begin(self, model: nn.Module) -> None:
        assert model.training
        same(model, self.initial, tolerance=0)
        self.calls.append("begin")

    def penalty(self, model: nn.Module) -> Tensor:
        self.calls.append("penalty")
        return torch.stack([p.square().sum() for p in model.parameters()]).sum() / 2

    def end(self, model: nn.Module) -> dict[str, float]:
        self.calls.append("end")
        return {"noted": 1.0}


def test_hooks_are_called_in_order_and_a_penalty_is_not_in_the_loss(
    points, mlp
) -> None:
    """The gradient of half the squared norm equals a weight decay of 1."""
    data, model, decayed = points(8), mlp(), mlp()
    hook = Noted(model)
    hooks = {"noted": hook, "other": ClientHook()}
    result = run(model, data, batch_size=4, hooks=hooks)
    plain = run(decayed, data, batch_size=4, weight_decay=1.0)
    assert hook.calls == ["begin", "penalty", "penalty", "end"]
    same(model, decayed)
    assert result.metrics == {"noted": 1.0}
    assert result.loss == pytest.approx(plain.loss, rel=1e-13)


class Fails(ClientHook):
    """A hook that raises in the first step."""

    def penalty(self, model: nn.Module) -> Tensor:
        raise RuntimeError("in the first step")


def test_after_an_error_the_hook_that_began_last_ends_first(points, mlp) -> None:
    """Each hook finds the model as it left it, even if a later hook changed it."""
    model, ended = mlp(), []
    hooks = {"a": Noted(model), "b": Noted(model), "c": Fails()}
    for number, hook in enumerate(hooks.values()):
        hook.end = lambda model, number=number: ended.append(number)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="first step"):
        run(model, points(8), batch_size=4, hooks=hooks)
    assert ended == [2, 1, 0]


class Breaks:
    """Data whose batch of this number raises the error."""

    def __init__(self, data: Any, left: int, error: BaseException) -> None:
        self.data, self.left, self.error = data, left, error

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, positions, generator=None):
        self.left -= 1
        if not self.left:
            raise self.error
        return self.data.batch(positions, generator)


def test_a_virtual_batch_of_one_row_names_the_layer_and_the_batch(points, mlp) -> None:
    model = mlp(kind=Ghost)
    assert run(model, points(10), batch_size=10).num_steps == 1
    with pytest.raises(NormLayerError, match=r"'1' .* 9 examples"):
        run(model, points(9), batch_size=9)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("left", [1, 3])
def test_a_training_that_fails_leaves_the_model_as_it_was(
    error: type[BaseException], left: int, mlp, points
) -> None:
    """A model that a user trains again trains like a new model."""
    model, data = mlp().train(), points(12, 0)
    before = settings_of(model)
    hooks = {"freeze-bn": FreezeBN(affine=True)}
    options = {"batch_size": 4, "local_steps": 3, "hooks": hooks}
    with pytest.raises(error):
        run(model, Breaks(data, left, error()), **options)
    assert settings_of(model) == before
