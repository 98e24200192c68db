"""Planted faults of a model, a state or its loaders: the doctor names each, and its remedy first."""

from __future__ import annotations

import copy
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from fedbn_flwr import diagnose
from fedbn_flwr.doctor import Diagnosis, Finding, Training, diagnose_state
from fedbn_flwr.doctor.by_batch import held_layers
from fedbn_flwr.doctor.data_rules import train_test_mismatch
from fedbn_flwr.doctor.measured import Measured
from fedbn_flwr.doctor.mismatch import Mismatch
from fedbn_flwr.doctor.state import named, read_state_file
from fedbn_flwr.errors import ConfigError, DataError, StateError
from fedbn_flwr.norms.renorm import use_batch_renorm
from fedbn_flwr.training.freezing import hold_eval
from tests.support.trained import trained_network

NUM_CLIENTS = 4
TWO_CLIENTS = "one client against the others: 2 clients, of 4 that it needs."
Loaders = Callable[..., list[torch.utils.data.DataLoader]]


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    inputs, targets = load_digits(return_X_y=True)
    return torch.tensor(inputs[:800], dtype=torch.float32) / 16, torch.tensor(targets[:800])


@pytest.fixture(scope="module")
def loaders(digits) -> Loaders:
    """``loaders(batch_size)``: equal clients, drawn at random."""

    def make(batch_size: int = 32) -> list[torch.utils.data.DataLoader]:
        order = torch.randperm(len(digits[0]), generator=torch.Generator().manual_seed(0))
        sets = [torch.utils.data.TensorDataset(digits[0][own], digits[1][own]) for own in order.chunk(NUM_CLIENTS)]
        return [torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=True) for data in sets]

    return make


@pytest.fixture(scope="module")
def trained(digits) -> nn.Module:
    """A network of two BatchNorm layers that has learned the digits."""
    return trained_network(*digits, epochs=12, batch_size=40)


def seed_of(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def first(found: Diagnosis) -> tuple[str, str]:
    """The first finding, and its first remedy."""
    return found.findings[0].id, found.findings[0].remedies[0].setting


def test_nothing_is_found_in_a_healthy_model_and_nothing_changes(trained: nn.Module, loaders: Loaders) -> None:
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    draws = torch.get_rng_state()
    found = diagnose(trained, loaders())
    assert (found.findings, found.not_measured) == ([], [])
    assert "Nothing found." in str(found)
    assert torch.equal(torch.get_rng_state(), draws)
    assert not trained.training
    assert all(torch.equal(value, before[name]) for name, value in trained.state_dict().items())


def test_what_was_not_measured_is_not_called_sound(trained: nn.Module) -> None:
    """No finding beside parts that could not be measured is no proof of health."""
    for found in (diagnose_state(trained.state_dict()), Diagnosis("A model.", [], {}, ["shift: no memory is left."])):
        assert found.not_measured
        assert not found.findings
        for text in (str(found), found.markdown()):
            assert "Nothing found." not in text
            assert f"Not known: {len(found.not_measured)} part" in text


class _Draws(nn.Module):
    """A forward pass that draws from the generators of torch, NumPy and Python, in eval mode, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1e-3 * torch.randn(x.shape) + 1e-3 * np.random.rand() + 1e-3 * random.random()


def test_a_model_that_draws_in_forward_leaves_the_generators_alone(digits) -> None:
    model = nn.Sequential(_Draws(), nn.BatchNorm1d(64), nn.Linear(64, 10)).eval()
    before = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    loaders = [[(digits[0][k : k + 8], digits[1][k : k + 8])] for k in (0, 8)]
    first, second = (diagnose(model, loaders).to_json()["measures"] for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (str(np.random.get_state()), random.getstate()) == before[1:]
    assert first["shift"] == second["shift"]


@pytest.mark.parametrize("targets", ["0 and 1", "numbers"])
def test_one_logit_with_targets_0_and_1_has_the_loss_of_a_logit(targets: str, digits) -> None:
    model = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 1)).eval()
    values = (digits[1] < 5).float() if targets == "0 and 1" else digits[1].float()
    found = diagnose(model, [[(digits[0][k : k + 32], values[k : k + 32])] for k in (0, 32)])
    with torch.no_grad():
        losses = nn.functional.binary_cross_entropy_with_logits, nn.functional.mse_loss
        wanted = losses[targets == "numbers"](model(digits[0][:64])[:, 0], values[:64])
    assert found.measures["train-test-mismatch"]["running_loss"] == pytest.approx(float(wanted), rel=1e-5)
    assert any("taken for a logit" in note for note in found.notes) == (targets == "0 and 1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("one_hot", [True, False])
def test_rows_of_0_and_1_have_the_loss_of_their_kind(one_hot: bool, dtype: torch.dtype, digits) -> None:
    """A one-hot row is one class an example; a row of several labels is not."""
    model = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10)).eval()
    rows = nn.functional.one_hot(digits[1], 10).to(dtype)
    rows[:, 0] = rows[:, 0] if one_hot else 1
    found = diagnose(model, [[(digits[0][k : k + 32], rows[k : k + 32])] for k in (0, 32)])
    with torch.no_grad():
        loss = nn.functional.cross_entropy if one_hot else nn.functional.binary_cross_entropy_with_logits
        outputs = model(digits[0][:64])
        wanted = loss(outputs, rows[:64].float())
    assert found.measures["train-test-mismatch"]["running_loss"] == pytest.approx(float(wanted), rel=1e-5)
    assert any(("0 and 1: cross" if one_hot else "0 and 1: binary cross") in note for note in found.notes)
    right = float((outputs.argmax(1) == digits[1][:64]).float().mean())
    assert found.measures["train-test-mismatch"]["running_accuracy"] == (pytest.approx(right) if one_hot else None)
    assert ("class-skew" in found.measures) == one_hot
    assert found.not_measured[0] == TWO_CLIENTS
    assert found.not_measured[1:] == ([] if one_hot else ["label skew: the targets are not one class an example."])


def test_two_integers_an_example_are_no_classes(digits) -> None:
    model = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10)).eval()
    pairs = torch.stack([digits[1], digits[1] + 1], 1)
    loaders = [[(digits[0][k : k + 32], pairs[k : k + 32])] for k in (0, 32)]
    own = diagnose(model, loaders, loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets[:, 0]))
    assert own.measures["train-test-mismatch"]["running_accuracy"] is None
    assert "mismatch of training and test: no loss is known for outputs" in " ".join(
        diagnose(model, loaders).not_measured
    )


def test_train_mode(trained: nn.Module, loaders: Loaders) -> None:
    trained.train()
    found = diagnose(trained, loaders())
    assert trained.training, "the mode stays"
    trained.eval()
    assert first(found) == ("tested-with-batch-statistics", "model.eval()")
    numbers = found.findings[0].numbers
    assert numbers["layers"] == ["1", "4"]
    assert numbers["sorted"] < 0.5 < 0.95 < numbers["eval"], "the order of the examples decides"


def test_a_layer_without_running_statistics(loaders: Loaders) -> None:
    layer = nn.BatchNorm1d(64, track_running_stats=False)
    found = diagnose(nn.Sequential(layer, nn.Linear(64, 10)).eval(), loaders())
    assert first(found) == ("tested-with-batch-statistics", "track_running_stats=True")


@pytest.mark.parametrize("untracked", ["no layer", "the first", "the last"])
@pytest.mark.parametrize("fault", ["label-skew", "train-test-mismatch"])
def test_a_layer_without_running_statistics_hides_no_other_fault(
    untracked: str, fault: str, trained: nn.Module, digits
) -> None:
    model = copy.deepcopy(trained)
    if untracked != "no layer":
        place, width = (1, 48) if untracked == "the first" else (4, 32)
        model[place] = nn.BatchNorm1d(width, track_running_stats=False).eval()
    if fault == "train-test-mismatch":
        layer = model[4 if untracked == "the first" else 1]
        layer.running_mean += 2 * layer.running_var.sqrt() * (-1) ** torch.arange(layer.num_features)
    order = torch.argsort(digits[1]) if fault == "label-skew" else torch.randperm(800, generator=seed_of(0))
    found = diagnose(model, [[(digits[0][own], digits[1][own])] for own in order.chunk(NUM_CLIENTS)])
    ids = [f.id for f in found.findings]
    assert fault in ids
    assert ids[0] == ("tested-with-batch-statistics" if untracked != "no layer" else fault)
    assert ("label-skew" in ids) == (fault == "label-skew"), "no false alarm"


def test_batch_size_2(trained: nn.Module, loaders: Loaders) -> None:
    found = diagnose(trained, loaders(batch_size=2))
    assert first(found) == ("small-batch", "batch-size=16")
    assert found.findings[0].numbers["noise"] > 0.5


@pytest.mark.parametrize("first_batch", ["own", "training's"])
def test_clients_that_hold_less_than_a_batch(first_batch: str, trained: nn.Module, digits) -> None:
    """The batch size of the training is not that of a client with three examples."""
    sizes = [3, 3, 3, 60] if first_batch == "own" else [60, 60, 60, 60]
    parts = zip(digits[0][: sum(sizes)].split(sizes), digits[1][: sum(sizes)].split(sizes), strict=True)
    found = diagnose(trained, [[one] for one in parts], training=Training(batch_size=32))
    assert found.measures["batch-sizes"] == ([3, 3, 3, 32] if first_batch == "own" else [32] * 4)
    small = [f for f in found.findings if f.id == "small-batch"]
    assert len(small) == (first_batch == "own")
    assert all("Batches have 3 examples at 3 of 4 clients." in f.evidence for f in small)
    assert "batch-size=16" not in [remedy.setting for f in small for remedy in f.remedies], "it is 32"


@pytest.mark.parametrize("layer", [1, 4])
@pytest.mark.parametrize("fault", ["gamma", "beta"])
def test_a_dead_layer(fault: str, layer: int, trained: nn.Module, loaders: Loaders) -> None:
    """A beta far below 0 is seen by what is behind it: the next BatchNorm's input, or the outputs."""
    model = copy.deepcopy(trained)
    with torch.no_grad():
        model[layer].weight.mul_(1e-9 if fault == "gamma" else 1)
        model[layer].bias.sub_(0 if fault == "gamma" else 100)
    found = diagnose(model, loaders())
    assert first(found) == ("dead-layer", "learning-rate ten times lower")
    behind = {"layers": [], "in-front-of": "4" if layer == 1 else ""}
    assert found.findings[0].numbers == ({"layers": [str(layer)]} if fault == "gamma" else behind)


class _Shortcut(nn.Module):
    """relu(x + norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.norm(x))


@pytest.mark.parametrize(
    ("kind", "blocked"),
    [("an addition", "3"), ("a ReLU in front of BatchNorm", "2"), ("a sigmoid", "3"), ("nothing behind it", "")],
)
def test_a_network_that_is_dead_elsewhere(kind: str, blocked: str, digits) -> None:
    """No BatchNorm layer has a constant output of inputs that vary, and every example has the same logits."""
    torch.manual_seed(0)
    middle: list[nn.Module] = {
        "an addition": [_Shortcut(), nn.Linear(16, 16), nn.BatchNorm1d(16)],
        "a ReLU in front of BatchNorm": [nn.ReLU(), nn.BatchNorm1d(16)],
        "a sigmoid": [nn.BatchNorm1d(16), nn.Sigmoid(), nn.BatchNorm1d(16)],
        "nothing behind it": [nn.BatchNorm1d(16), nn.Linear(16, 16), nn.ReLU()],
    }[kind]
    model = nn.Sequential(nn.Linear(64, 16), *middle, nn.Linear(16, 10)).eval()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.num_batches_tracked += 1
            layer.running_mean += 0.01
    killed = {"an addition": getattr(middle[0], "norm", None), "a ReLU in front of BatchNorm": model[0]}
    killed |= {"a sigmoid": middle[0], "nothing behind it": middle[1]}
    nn.init.constant_(killed[kind].bias, -200.0)
    loaders = [[(digits[0][k : k + 100], digits[1][k : k + 100])] for k in (0, 100)]
    found = diagnose(model, loaders)
    assert first(found) == ("dead-layer", "learning-rate ten times lower")
    assert found.findings[0].numbers == {"layers": [], "in-front-of": blocked}
    assert "The model has the same output for all examples." in found.findings[0].evidence
    same = [[(digits[0][:1].repeat(len(y), 1), y)] for [(_, y)] in loaders]
    assert "dead-layer" not in [f.id for f in diagnose(model, same).findings], "the inputs are the same already"


@pytest.mark.parametrize("at_0", [1, 2], ids=["gamma", "the last layer"])
def test_what_starts_at_0_is_dead_only_after_training(at_0: int, digits) -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)).eval()
    nn.init.zeros_(model[at_0].weight)
    loaders = [[(digits[0][k : k + 32], digits[1][k : k + 32])] for k in (0, 32)]
    assert "dead-layer" not in [f.id for f in diagnose(model, loaders).findings]
    model[1].num_batches_tracked += 1
    assert "dead-layer" in [f.id for f in diagnose(model, loaders).findings]


def test_inputs_that_are_not_finite_are_named_with_their_client(trained: nn.Module, digits) -> None:
    """With NaN nothing else can be measured: an empty answer would pass for a healthy model."""
    parts = [(digits[0][k : k + 50].clone(), digits[1][k : k + 50]) for k in (0, 50, 100)]
    parts[1][0][3, 7] = float("nan")
    found = diagnose(trained, {name: [part] for name, part in zip("abc", parts, strict=True)})
    assert found.findings[0].id == "inputs-not-finite"
    assert found.findings[0].evidence == ["Client b: 1 of 50 examples."]


def test_features_that_are_constant_kill_no_layer(digits) -> None:
    inputs = torch.cat([torch.zeros(64, 40), digits[0][:64, 20:44]], 1)
    model = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10)).train()
    for _ in range(150):
        model(inputs)
    found = diagnose(model.eval(), [[(inputs[k : k + 32], digits[1][k : k + 32])] for k in (0, 32)])
    assert first(found) == ("extreme-variance", "scale the inputs")
    assert "dead-layer" not in [f.id for f in found.findings]


@pytest.mark.parametrize(("layer", "first_remedy"), [(1, "scale the inputs"), (4, "learning-rate ten times lower")])
def test_the_scale_of_inputs_is_the_first_remedy_for_the_first_layer_alone(
    layer: int, first_remedy: str, trained: nn.Module, loaders: Loaders
) -> None:
    model = copy.deepcopy(trained)
    with torch.no_grad():
        model[layer - 1].weight.mul_(1e6)
        model[layer].running_var.mul_(1e12)
    found = [f for f in diagnose(model, loaders()).findings if f.id == "extreme-variance"]
    assert found[0].remedies[0].setting == first_remedy


@pytest.mark.parametrize("count", [15, 16])
def test_of_few_examples_no_layer_is_dead(count: int, digits) -> None:
    model = nn.Sequential(nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)).eval()
    nn.init.constant_(model[0].bias, -100.0)
    model[0].num_batches_tracked += 1
    found = diagnose(model, [[(digits[0][:count], digits[1][:count])]])
    assert ("dead-layer" in [f.id for f in found.findings]) == (count == 16)
    assert ("dead layers by their outputs: 15 examples, of 16 that it needs." in found.not_measured) == (count == 15)


def test_averaged_counters(trained: nn.Module, loaders: Loaders) -> None:
    """A plain mean of the clients' states, as floats; loading it would hide the fault."""
    clients = [dict(trained.state_dict()) for _ in range(3)]
    clients[0]["1.num_batches_tracked"] = clients[0]["1.num_batches_tracked"] + 1
    averaged = {name: torch.stack([c[name].double() for c in clients]).mean(0) for name in clients[0]}
    for found in (diagnose_state(averaged), diagnose(trained, loaders(), state=averaged)):
        assert first(found) == ("averaged-counters", "leave integer entries out of the average")
        assert found.findings[0].numbers["entries"]["1.num_batches_tracked"].endswith("3333 (float64)")


def test_a_state_or_a_model_of_a_wrapper_is_read_without_it(trained: nn.Module, digits) -> None:
    spoiled = {f"module.{name}": value.clone() for name, value in trained.state_dict().items()}
    spoiled["module.1.running_var"] -= 1e3
    loaders = [[(digits[0][:32], digits[1][:32])]]
    wrapped = nn.DataParallel(copy.deepcopy(trained)).eval()
    for found in (
        diagnose(trained, loaders, state=spoiled),
        diagnose_state(spoiled, model=trained),
        diagnose_state(trained.state_dict() | {"1.running_var": spoiled["module.1.running_var"]}, model=wrapped),
    ):
        assert [*found.findings[0].numbers["entries"]] == ["1.running_var"]
    with pytest.raises(StateError, match="the saved state does not fit the model"):
        diagnose(trained, loaders, state={"1.running_var": torch.ones(48)})


@pytest.mark.parametrize(("factor", "ids"), [(1e-9, ["extreme-variance", "train-test-mismatch"]), (1e-4, None)])
def test_a_running_variance_that_does_not_fit_the_data(
    factor: float, ids: list[str] | None, trained: nn.Module, loaders: Loaders, digits
) -> None:
    """The inputs vary as they did, so there is no constant input; accuracy stays, and the loss explodes."""
    model = copy.deepcopy(trained)
    model[4].running_var.mul_(factor)
    tests = [(digits[0], torch.where(torch.arange(800) % 10 == 0, (digits[1] + 1) % 10, digits[1]))]
    found = diagnose(model, loaders(), test_loaders=[tests])
    assert [f.id for f in found.findings] == (ids or ["train-test-mismatch"])
    assert first(found)[1] == "recalibrate=true"
    wanted = "4: of 32 channels 32 have a variance below eps (0 in the data)"
    assert found.findings[0].evidence[0].startswith(wanted) == bool(ids)
    assert found.findings[-1].evidence[1].startswith("In 4 the running variance is a factor of")


def _trained_with(momentum: float | None, digits) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32, momentum=momentum), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for batch in torch.randperm(len(digits[0])).split(8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(3 * digits[0][batch] - 5), digits[1][batch]).backward()
            optimizer.step()
    return model.eval()


@pytest.mark.parametrize("cause", ["momentum 0", "not sent"])
def test_statistics_that_never_moved_are_the_cause(cause: str, digits) -> None:
    model = _trained_with(0.0 if cause == "momentum 0" else 0.1, digits)
    if cause == "not sent":
        model[1].running_mean.zero_()
        model[1].running_var.fill_(1.0)
    found = diagnose(model, [[(3 * digits[0][own] - 5, digits[1][own])] for own in torch.arange(800).chunk(4)])
    assert [f.id for f in found.findings] == ["unmoved-statistics", "train-test-mismatch"]
    wanted = "bn-momentum=0.1" if cause == "momentum 0" else "send and average the running statistics"
    assert [r.setting for r in found.findings[0].remedies] == [wanted, "recalibrate=true"]
    assert [r.setting for r in found.findings[1].remedies] == ["recalibrate=true"]
    assert found.findings[0].evidence[0] == "1: mean 0 and variance 1, as at first, after 300 batches."
    assert [f.id for f in diagnose_state(model.state_dict()).findings] == ["unmoved-statistics"]
    fresh = nn.Sequential(nn.BatchNorm1d(2))
    assert diagnose_state(fresh.state_dict(), model=fresh).findings == [], "no batch was counted"


@pytest.mark.parametrize("moved", [True, False])
def test_a_momentum_of_0_is_named_where_it_harms(moved: bool, trained: nn.Module, loaders: Loaders) -> None:
    """Statistics of another training, which this one left as they were."""
    model = copy.deepcopy(trained)
    model[1].momentum = 0.0
    if moved:
        model[1].running_mean += 3 * model[1].running_var.sqrt() * (-1) ** torch.arange(48)
    ids = [f.id for f in diagnose(model, loaders()).findings]
    assert ids == (["unmoved-statistics", "train-test-mismatch"] if moved else [])


@pytest.mark.parametrize(
    ("momentum", "advice"),
    [
        *((0.1, ["bn-momentum=0.3"]), (None, ["bn-momentum=0.3"]), (0.3, [])),
        *((0.9, ["bn-momentum=0.1"]), (1.0, ["bn-momentum=0.1"])),
    ],
)
def test_advice_on_momentum_fits_the_momentum(
    momentum: float | None, advice: list[str], trained: nn.Module, loaders: Loaders
) -> None:
    model = copy.deepcopy(trained)
    for layer in (model[1], model[4]):
        layer.momentum = momentum
    model[4].running_mean += 3 * model[4].running_var.sqrt() * (-1) ** torch.arange(32)
    (found,) = diagnose(model, loaders()).findings
    assert found.id == "train-test-mismatch"
    settings = [remedy.setting for remedy in found.remedies]
    assert settings == ["recalibrate=true", *advice, "strategy=fixbn lr-decay-at=freeze"]


def test_eps_of_1_makes_no_variance_small(trained: nn.Module, digits) -> None:
    model = copy.deepcopy(trained)
    for layer in (model[1], model[4]):
        layer.eps = 1.0
    assert "extreme-variance" not in [f.id for f in diagnose_state(model.state_dict(), model=model).findings]


def _gap(running_accuracy: float | None, running: float, batch: float) -> Measured:
    batch_accuracy = None if running_accuracy is None else 0.9
    return Measured(gap=Mismatch(100, running, batch, running_accuracy, batch_accuracy, 9.0))


@pytest.mark.parametrize(
    ("measured", "found"),
    [
        (_gap(0.84, 0.3, 0.2), True),
        (_gap(0.88, 0.3, 0.2), False),
        (_gap(0.88, 4.0, 0.2), True),
        (_gap(0.90, 4.0, 0.2), True),  # wrong with certainty where it is wrong
        (_gap(0.88, 0.8, 0.2), False),
        (_gap(None, 0.3, 0.2), True),
        (_gap(None, 0.22, 0.2), False),
        (_gap(None, -2.41, -2.43), False),  # a negative loss
        (_gap(None, -1.0, -2.43), True),
    ],
)
def test_how_much_a_mismatch_loses(measured: Measured, found: bool) -> None:
    assert (train_test_mismatch(measured) is not None) == found


@pytest.mark.parametrize("examples", [2, 400])
def test_a_collapse_of_the_accuracy_is_found_whatever_the_loss_says(examples: int) -> None:
    """Confident errors cost more under the batch's statistics; under a huge running variance all outputs are equal."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).eval()
    model[0].running_var.fill_(1e8)
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[-100.0, 0.0], [100.0, 0.0]]))
        model[1].bias.copy_(torch.tensor([1.0, 0.0]))
    targets = torch.arange(examples) % 2
    inputs = torch.stack([2.0 * targets - 1, torch.zeros(examples)], 1)
    targets = torch.where(torch.arange(examples) % 20 >= 18, 1 - targets, targets)
    found = diagnose(model, [[(inputs, targets)]])
    gap = found.measures["train-test-mismatch"]
    assert gap["z"] < 4
    assert ("train-test-mismatch" in [f.id for f in found.findings]) == (examples == 400)


def test_a_filter_on_names_for_resnet18() -> None:
    model = resnet18()
    found = diagnose_state(model.state_dict(), model=model, local_keys=[n for n in model.state_dict() if "bn" in n])
    assert first(found) == ("name-filter", "fedbn_flwr.split_state(model)")
    assert found.findings[0].numbers["layers"] == [f"layer{n}.0.downsample.1" for n in (2, 3, 4)]
    assert "`'bn' in name` keeps exactly the other layers" in " ".join(str(found).split())


def test_a_split_given_by_what_is_sent_or_with_a_wrappers_prefix() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    names = list(model.state_dict())
    sent = [f"module.{name}" for name in names if not name.startswith("1.")]
    found = diagnose_state(model.state_dict(), model=model, shared_keys=sent)
    assert found.findings[0].numbers["layers"] == ["2"]
    assert diagnose_state(model.state_dict(), model=model, shared_keys=["0.weight", "0.bias"]).findings == []
    nothing = diagnose_state(model.state_dict(), model=model, local_keys=[])
    assert nothing.findings[0].what == "The split keeps no BatchNorm layer at all."
    with pytest.raises(ConfigError, match="local_keys: 1 of 1 names are no entries of the model"):
        diagnose_state(model.state_dict(), model=model, local_keys=["bn.weight"])
    with pytest.raises(ConfigError, match="give one of them"):
        diagnose_state(model.state_dict(), local_keys=names, shared_keys=names)


def test_statistics_that_a_server_optimizer_spoiled() -> None:
    state = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)).state_dict()
    state["0.running_var"] -= 1.5
    state["1.running_mean"][0] = float("nan")
    found = diagnose_state(state)
    assert [f.id for f in found.findings] == ["unusable-statistics"]
    assert set(found.findings[0].numbers["entries"]) == {"0.running_var", "1.running_mean"}
    assert first(found)[1] == "keep running statistics out of the server's optimizer"
    state["1.running_var"] = torch.tensor([-2.0, float("nan")])
    wanted = "1 of 2 values are not finite; 1 of 2 are negative, down to -2"
    assert diagnose_state(state).findings[0].numbers["entries"]["1.running_var"] == wanted
    state = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)).state_dict()
    state["0.running_var"] *= 1e9
    state["1.running_var"] *= 1e-9
    found = diagnose_state(state)
    assert found.findings[0].numbers["layers"] == {
        "0": {"near-zero": 0, "exploding": 2, "channels": 2},
        "1": {"near-zero": 2, "exploding": 0, "channels": 2},
    }


@pytest.mark.parametrize("fault", ["weight", "inputs"])
def test_values_that_are_not_finite(fault: str, trained: nn.Module, digits, tmp_path: Path) -> None:
    model, inputs = copy.deepcopy(trained), digits[0].clone()
    with torch.no_grad():
        (model[3].weight if fault == "weight" else inputs)[0, 0] = float("nan")
    order = [0, *digits[1].argsort().tolist()]  # clients of different classes
    found = diagnose(model, [[(inputs[own], digits[1][own])] for own in (order[:100], order[-100:])])
    assert not any("nan" in note for note in found.notes)
    assert any(
        line.startswith("shift of the statistics between clients: inputs of BatchNorm are not")
        for line in found.not_measured
    )
    if fault == "weight":
        assert first(found) == ("unusable-statistics", "lower learning-rate")
        assert found.findings[0].numbers["entries"] == {"3.weight": "1 of 1536 values are not finite"}
    assert any("mismatch of training and test: the loss of" in line for line in found.not_measured)
    assert len(found.save(tmp_path)) == 2


class _Extra(nn.Module):
    """A buffer and an entry of the state that are no weights: a mask of -inf, and a mapping."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mask", torch.full((2, 2), -torch.inf))

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def test_a_mask_and_extra_state_are_no_fault(trained: nn.Module, loaders: Loaders) -> None:
    model = _Extra(trained).eval()
    found = diagnose(model, loaders(), state=model.state_dict())
    assert (found.findings, found.not_measured) == ([], [])
    assert diagnose_state({"extra": None, "0.running_mean": torch.zeros(1)}).findings == []


def test_layers_without_shapes_are_an_error(loaders: Loaders) -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.LazyBatchNorm1d(), nn.Linear(8, 10)).eval()
    with pytest.raises(StateError, match=r"entries of the model have no shape yet \(1.weight, .*Run one batch"):
        diagnose(model, loaders())


def test_label_skew_and_the_number_of_local_steps(trained: nn.Module, digits) -> None:
    """The same data: with one step a round FedTAN is centralised training, with more FixBN acts in every step."""
    data = torch.utils.data.TensorDataset(*digits)
    by_class = {
        f"classes {k} and {k + 1}": torch.utils.data.DataLoader(
            torch.utils.data.Subset(data, torch.nonzero((digits[1] == k) | (digits[1] == k + 1)).flatten().tolist()),
            batch_size=32,
            shuffle=True,
        )
        for k in range(0, 10, 2)
    }
    one = diagnose(trained, by_class, training=Training(local_steps=1))
    assert first(one) == ("label-skew", "strategy=fedtan")
    assert first(diagnose(trained, by_class)) == ("label-skew", "strategy=fixbn lr-decay-at=freeze")
    assert any("feature shift apart from label skew" in line for line in one.not_measured)
    handled = diagnose(trained, by_class, training=Training(method="fixbn", handled=frozenset({"label-skew"})))
    assert "label-skew" not in [f.id for f in handled.findings]
    assert any("since fixbn is a remedy" in note for note in handled.notes)


class _Holding(nn.Sequential):
    """Some layers stay in eval mode: the usual way to fine-tune with frozen BatchNorm."""

    held: tuple[int, ...] = ()

    def train(self, mode: bool = True) -> nn.Sequential:
        super().train(mode)
        for index in self.held:
            self[index].eval()
        return self


@pytest.mark.parametrize("by", ["hold_eval", "its own train"])
@pytest.mark.parametrize("held", ["1", "1 and 4"])
def test_a_layer_that_is_held_in_eval_mode_is_not_accused(held: str, by: str, trained: nn.Module, digits) -> None:
    """Its training normalises by fixed statistics: neither the batch size nor the other clients' data reach it."""
    model, order = _Holding(*copy.deepcopy(trained)).eval(), torch.argsort(digits[1])
    indices = tuple(map(int, held.split(" and ")))
    if by == "its own train":
        model.held = indices
    else:
        for index in indices:
            hold_eval(model[index])
    assert held_layers(model) == held.split(" and ")
    by_class = [
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(digits[0][own], digits[1][own]), batch_size=2)
        for own in order.chunk(NUM_CLIENTS)
    ]
    found = diagnose(model, by_class)
    ids = [f.id for f in found.findings]
    assert ids[:2] == (["small-batch", "label-skew"] if held == "1" else []), ids
    assert all(f.numbers["layer"] == "4" for f in found.findings[:2])
    assert any(f"BatchNorm layers are held in eval mode ({held.replace(' and', ',')})" in note for note in found.notes)
    assert ("shift" in found.measures) == (held == "1")
    assert found.measures["layers"]["1"]["batch-deviation"]["mean"][0] > 0, "figures stay"


def test_a_layer_that_a_model_in_train_mode_has_in_eval_mode_counts_as_held(trained: nn.Module) -> None:
    model = copy.deepcopy(trained).train()
    model[1].eval()
    assert held_layers(model) == ["1"]


def test_a_model_that_cannot_be_copied_is_measured_in_part(trained: nn.Module, loaders: Loaders) -> None:
    model = _Holding(*copy.deepcopy(trained)).eval()
    model.held = (1,)
    model.kept = threading.Lock()
    hold_eval(model[4])
    found = diagnose(model, loaders())
    assert "1 of 2 BatchNorm layers are held in eval mode (4)" in " ".join(found.notes)
    assert sum("cannot be copied" in line for line in found.not_measured) == 4


def test_a_model_that_keeps_an_activation_is_measured_in_full(trained: nn.Module, loaders: Loaders) -> None:
    model = _Holding(*copy.deepcopy(trained)).eval()
    plain = diagnose(model, loaders())
    model.kept = model[0].weight * 2  # a tensor with a graph
    found = diagnose(model, loaders())
    assert not found.not_measured
    assert found.measures == plain.measures


class _Tied(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.BatchNorm1d(64, eps=1e-8)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.a(x))


def test_a_layer_under_two_names_has_one_eps_and_one_mode(digits) -> None:
    model = _Tied().eval()
    model.a.running_var.fill_(1e-6)
    assert "extreme-variance" not in [f.id for f in diagnose_state(model.state_dict(), model=model).findings]
    hold_eval(model.a)
    pairs = [[(digits[0][k : k + 2], digits[1][k : k + 2]) for k in range(c, c + 20, 2)] for c in (0, 20)]
    found = diagnose(model, pairs)
    assert "small-batch" not in [f.id for f in found.findings]
    assert any(note.startswith("2 of 2 BatchNorm layers are held in eval mode (a, b)") for note in found.notes)


class _Auxiliary(nn.Module):
    """A second head that is called in train mode alone, as in GoogLeNet."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.aux, self.head = nn.BatchNorm1d(64), nn.BatchNorm1d(64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x) + self.aux(x)) if self.training else self.head(self.norm(x))


def test_what_few_examples_and_layers_that_are_not_called_leave_open(digits) -> None:
    one_each = [[(digits[0][k : k + 1], digits[1][k : k + 1])] for k in range(2)]
    found = diagnose(_Auxiliary().eval(), one_each)
    assert "1 BatchNorm layer" not in found.about
    assert found.findings[0].evidence[0] == "Batches have 1 example at 2 of 2 clients."
    assert "2 BatchNorm layers, 2 clients, 2 examples." in found.about
    open_ = " ".join(found.not_measured)
    assert "aux: the model does not call it in eval mode" in open_
    assert "2 groups of examples of 2 clients are too few for a test" in open_


def test_the_answer_is_json_and_a_page(trained: nn.Module, loaders: Loaders, tmp_path: Path) -> None:
    found = diagnose(trained.train(), loaders())
    trained.eval()
    files = found.save(tmp_path / "doctor")
    assert sorted(path.name for path in files) == ["doctor.json", "doctor.md"]
    read = json.loads((tmp_path / "doctor/doctor.json").read_text())
    assert read.keys() == {"about", "findings", "measures", "not-measured", "notes"}
    assert read["findings"][0].keys() == {"id", "what", "evidence", "numbers", "remedies"}
    assert list(read["measures"]["layers"]) == ["1", "4"]
    assert "1. `model.eval()`:" in (tmp_path / "doctor/doctor.md").read_text()


def test_a_heading_of_the_page_is_one_line_and_text_is_not() -> None:
    long = Finding("id", "word " * 30 + "end.", ["evidence"], {}, [])
    found = Diagnosis("about", [long])
    assert not any("Try" in text for text in (str(found), found.markdown())), "there is no remedy"
    assert f"\n## 1. {long.what}\n" in found.markdown()
    assert max(map(len, str(found).splitlines())) <= 100


def test_a_model_without_batchnorm_and_loaders_without_examples(loaders: Loaders) -> None:
    found = diagnose(nn.Sequential(nn.Linear(64, 10)), loaders())
    assert found.not_measured == ["everything: the model has no BatchNorm layer."]
    with pytest.raises(ConfigError, match="client_loaders yield no examples"):
        diagnose(nn.Linear(64, 10), [])


@pytest.mark.parametrize("given", ["client_loaders", "test_loaders"])
@pytest.mark.parametrize("kind", ["DataLoader", "batches"])
def test_one_loader_in_place_of_a_list_is_an_error(given: str, kind: str, trained: nn.Module, loaders: Loaders) -> None:
    one = loaders()[0] if kind == "DataLoader" else [*loaders()[0]]
    arguments = {"client_loaders": loaders(), given: one}
    with pytest.raises(DataError, match=r"yields Tensor; .* pass a list of loaders, one for each client"):
        diagnose(trained, **arguments)


def test_a_client_without_examples_is_named(trained: nn.Module, loaders: Loaders) -> None:
    found = diagnose(trained, [*loaders()[:2], []], test_loaders={"x": [], "y": loaders()[2]})
    assert found.measures["clients"] == ["0", "1"]
    assert found.notes == [
        "client 2: its loader yields no examples; it is left out.",
        "client x: its test loader yields no examples; it is left out.",
    ]


def test_a_model_that_returns_no_tensor_is_measured_in_part(loaders: Loaders) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(64), nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"out": self.head(self.norm(x))}

    found = diagnose(Named().eval(), loaders())
    assert found.measures["shift"]["p-value"] > 0.001
    assert [line.split(":")[0] for line in found.not_measured] == [
        *("mismatch of training and test", "accuracy and loss of each client")
    ]
    assert "the model returns dict, not one tensor" in found.not_measured[0]


class _ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(input=x))


def test_a_layer_that_is_called_by_keyword_is_measured(digits) -> None:
    """The last batch has one example, so the values of a batch are counted, too."""
    loaders = [
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(digits[0][own], digits[1][own]), batch_size=8)
        for own in torch.arange(66).chunk(2)
    ]
    found = diagnose(_ByKeyword().eval(), loaders)
    assert found.not_measured == [TWO_CLIENTS]
    assert {"batch-noise", "shift"} <= found.measures["layers"]["norm"].keys()


class _Twice(nn.Module):
    """One layer, called for both halves of the inputs, which differ; or a layer for each."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.a = nn.BatchNorm2d(1)
        self.b = self.a if shared else nn.BatchNorm2d(1)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 1, 8, 8)
        return self.head(torch.cat([self.a(x[..., :4]), self.b(x[..., 4:] + 3)], 3).flatten(1))


def test_a_layer_that_is_called_twice_in_a_pass_has_one_batch(digits) -> None:
    pairs = [[(digits[0][k : k + 4], digits[1][k : k + 4]) for k in range(c, c + 40, 4)] for c in (0, 40)]
    shared, apart = (diagnose(_Twice(shared).eval(), pairs) for shared in (True, False))
    noise = [max(row["batch-noise"]) for found in (shared, apart) for row in found.measures["layers"].values()]
    assert noise[0] < min(noise[1:])
    assert "small-batch" not in [f.id for f in shared.findings]
    assert shared.not_measured == [TWO_CLIENTS]


def _squeezed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if outputs.squeeze().dim() < 2:
        raise ValueError("no batch")
    return nn.functional.cross_entropy(outputs.squeeze(), targets)


@pytest.mark.parametrize(
    ("fault", "lacking"),
    [
        ("frozen", [TWO_CLIENTS]),
        ("squeeze", [TWO_CLIENTS, "mismatch of training and test: ValueError: no batch", "accuracy and loss"]),
        (
            "labels from 1",
            [
                TWO_CLIENTS,
                *("mismatch of training and test: IndexError: T", "accuracy and loss of each client: IndexError: T"),
            ],
        ),
        ("one test", [TWO_CLIENTS, "mismatch of training and test: it needs two test examples."]),
        ("129 examples", [TWO_CLIENTS]),
        (
            "wrong width",
            ["statistics of the batches: RuntimeError: ", *["differences", "mismatch", "accuracy"]],
        ),
    ],
)
def test_a_measurement_that_fails_leaves_the_others(fault: str, lacking: list[str], digits) -> None:
    untracked = fault == "129 examples"
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8, track_running_stats=not untracked), nn.Linear(8, 10))
    model.eval().requires_grad_(fault != "frozen")
    inputs, targets = digits[0][:, : 60 if fault == "wrong width" else 64], digits[1] + (fault == "labels from 1")
    clients = [[(inputs[:64], targets[:64])], [(inputs[64:129], targets[64:129])]]
    loss = {"loss": _squeezed} if fault == "squeeze" else {}
    tests = [[(inputs[:1], targets[:1])]] if fault == "one test" else []
    found = diagnose(model, clients, test_loaders=tests, **loss)
    assert len(found.not_measured) == len(lacking), found.not_measured
    assert all(line.startswith(start) for line, start in zip(found.not_measured, lacking, strict=True))
    assert ("batch-noise" in found.measures["layers"]["1"]) == (fault != "wrong width")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("scripted", ["the model", "a part of it"])
def test_a_scripted_model_is_measured_where_its_layers_can_be_seen(scripted: str, trained: nn.Module, digits) -> None:
    model = copy.deepcopy(trained)
    model[4].running_var[0] = -1
    order = torch.argsort(digits[1])
    loaders = [[(digits[0][own], digits[1][own])] for own in order.chunk(NUM_CLIENTS)]
    if scripted == "the model":
        found = diagnose(torch.jit.script(model), loaders)
        assert [f.id for f in found.findings] == ["unusable-statistics"]
        assert len(found.not_measured) == 1
    else:
        model[1] = torch.jit.script(model[1])
        found = diagnose(model, loaders)
        assert {"unusable-statistics", "label-skew"} <= {f.id for f in found.findings}
    paths = "1, 4" if scripted == "the model" else "1"
    assert found.not_measured[0].startswith(f"all that needs data, in {paths}: TorchScript's layers cannot be watched")


def test_layers_that_are_not_called_say_nothing_of_the_size_of_the_batches(digits) -> None:
    model = _Auxiliary().eval()
    model.norm = nn.Identity()
    found = diagnose(model, [[(digits[0][k : k + 32], digits[1][k : k + 32])] for k in (0, 32)])
    assert "aux: the model does not call it in eval mode." in found.not_measured
    assert "too small" not in " ".join(found.not_measured)


def test_a_model_of_one_layer_without_parameters(digits) -> None:
    """Nothing to train, and a path that is empty: the text names the layer all the same."""
    model = nn.BatchNorm1d(64, affine=False).eval()
    model.running_mean.add_(torch.arange(64) * 100.0)
    found = diagnose(model, [[(digits[0][k : k + 32], digits[1][k : k + 32])] for k in (0, 32)])
    assert found.not_measured == [TWO_CLIENTS]
    assert first(found)[0] == "train-test-mismatch"
    assert "In (the model itself) the running mean" in str(found)


def test_a_loss_with_weights_of_the_models_type_and_a_caller_without_gradient(trained: nn.Module, digits) -> None:
    model = copy.deepcopy(trained).double()
    loss = nn.CrossEntropyLoss(weight=torch.ones(10, dtype=torch.float64))
    with torch.no_grad():
        found = diagnose(model, [[(digits[0][k : k + 32], digits[1][k : k + 32])] for k in (0, 32)], loss=loss)
    assert found.not_measured == [TWO_CLIENTS]


def test_no_examples_are_too_few(trained: nn.Module, loaders: Loaders) -> None:
    with pytest.raises(ConfigError, match="max_examples=0: it must be at least 1"):
        diagnose(trained, loaders(), max_examples=0)


def test_batch_renorm_takes_small_batches(trained: nn.Module, loaders: Loaders) -> None:
    model = copy.deepcopy(trained)
    use_batch_renorm(model)
    assert "small-batch" not in [f.id for f in diagnose(model.eval(), loaders(batch_size=2)).findings]


def test_inputs_of_several_shapes_are_refused(trained: nn.Module) -> None:
    ragged = [(torch.zeros(2, n), torch.zeros(2, dtype=torch.int64)) for n in (3, 4)]
    with pytest.raises(DataError, match=r"client 0 yields batches that cannot be joined.*\(2, 3\), \(2, 4\)"):
        diagnose(trained, [ragged])


# --- saved states ----------------------------------------------------------------------------------------------------


def test_saved_states_of_every_format(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    state = model.state_dict()
    save_file(state, tmp_path / "a.safetensors")
    torch.save(
        {"state_dict": {f"module.{name}": value for name, value in state.items()}, "epoch": 3}, tmp_path / "b.pt"
    )
    np.savez(tmp_path / "c.npz", **{name: value.numpy() for name, value in state.items()})
    np.savez(tmp_path / "d.npz", *[value.numpy() for value in state.values()])
    for file in ("a.safetensors", "b.pt", "c.npz", "d.npz"):
        read = named(read_state_file(tmp_path / file), state)
        assert all(torch.equal(read[name], value) for name, value in state.items())
    with pytest.raises(StateError, match="a list of 7 arrays without names, and the model has 2 entries"):
        named(read_state_file(tmp_path / "d.npz"), nn.Linear(3, 2).state_dict())
    (tmp_path / "e.pt").write_bytes(b"no state")
    with pytest.raises(StateError, match=r"e.pt cannot be read: \w+: "):
        read_state_file(tmp_path / "e.pt")


def test_a_few_extreme_channels_are_figures_and_no_finding(trained: nn.Module, loaders) -> None:
    model = copy.deepcopy(trained)
    with torch.no_grad():
        model[1].running_var[0] = 1e-9
        model[1].weight[1:3] = 0.0
    want = {"variances-below-eps": 1, "variances-above-1e8": 0, "gammas-of-0": 2}
    for found in (diagnose_state(model.state_dict()), diagnose(model, loaders())):
        row = found.measures["layers"]["1"]
        assert {name: row[name] for name in want} == want
        assert "extreme-variance" not in [finding.id for finding in found.findings]
    assert diagnose_state(trained.state_dict()).measures == {"layers": {}}
