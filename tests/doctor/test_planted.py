"""The doctor names each planted fault, and the remedy first."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

from fedbn_flwr import diagnose
from fedbn_flwr.doctor import Diagnosis, Training, diagnose_state
from fedbn_flwr.doctor.by_batch import eval_layers
from fedbn_flwr.doctor.data_rules import train_test_mismatch
from fedbn_flwr.doctor.measured import Measurements
from fedbn_flwr.doctor.mismatch import Mismatch
from fedbn_flwr.doctor.state import named, read_state_file
from fedbn_flwr.errors import ConfigError, DataError, StateError
from fedbn_flwr.training.freezing import force_eval
from tests.support.trained import learn, trained_network

NUM_CLIENTS = 4


@dataclass
class Ground:
    """A sound model that was trained on the digits. A plant spoils a copy."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor

    def loaders(
        self, order: Tensor, batch_size: int, shuffle: bool
    ) -> list[DataLoader]:
        """Return the loaders of clients that share the examples in this order."""
        return [
            DataLoader(
                TensorDataset(self.inputs[own], self.targets[own]), batch_size, shuffle
            )
            for own in order.chunk(NUM_CLIENTS)
        ]

    def batch(self, start: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Return a loader of one batch, these examples."""
        return [(self.inputs[start:end], self.targets[start:end])]

    def equal(self, batch_size: int = 32) -> list[DataLoader]:
        """Return loaders of equal clients, drawn at random."""
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(self.inputs), generator=generator)
        return self.loaders(order, batch_size, shuffle=True)

    def by_class(self, batch_size: int = 200) -> list[DataLoader]:
        """Clients with two to three classes each."""
        order = torch.argsort(self.targets, stable=True)
        return self.loaders(order, batch_size, shuffle=False)


@pytest.fixture(scope="module")
def sound() -> Ground:
    from sklearn.datasets import load_digits

    inputs, targets = load_digits(return_X_y=True)
    digits = torch.tensor(inputs[:800]).float() / 16, torch.tensor(targets[:800])
    return Ground(trained_network(*digits, epochs=12, batch_size=40), *digits)


@pytest.fixture
def ground(sound: Ground) -> Ground:
    return Ground(copy.deepcopy(sound.model), sound.inputs, sound.targets)


def ids(found: Diagnosis) -> list[str]:
    return [finding.id for finding in found.findings]


# The doctor must find these faults.


def no_running_statistics(ground: Ground) -> Diagnosis:
    layer = nn.BatchNorm1d(64, track_running_stats=False)
    return diagnose(nn.Sequential(layer, nn.Linear(64, 10)).eval(), ground.equal())


def clients_below_a_batch(ground: Ground) -> Diagnosis:
    """The training's batch size, 32, exceeds a client with three examples."""
    loaders = [ground.batch(at, at + 3) for at in (0, 3, 6)]
    loaders.append(ground.batch(9, 69))
    return diagnose(ground.model, loaders, training=Training(batch_size=32))


def frozen_backbone(ground: Ground) -> Diagnosis:
    ground.model.requires_grad_(False)[6].requires_grad_(True)
    return diagnose(ground.model, ground.equal())


def averaged_counters(ground: Ground) -> Diagnosis:
    """The floats of three clients are averaged. One client took one more step.

    Loading it into a model would hide the fault.
    """
    state = {name: x.double() for name, x in ground.model.state_dict().items()}
    state["1.num_batches_tracked"] += 1 / 3
    assert ids(diagnose_state(state))[0] == "averaged-counters"
    return diagnose(ground.model, ground.equal(), state=state)


def tiny_variance(ground: Ground) -> Diagnosis:
    """The variance of the inputs did not change, so no input is constant.

    The accuracy stays, and the loss explodes.
    """
    ground.model[4].running_var.mul_(1e-9)
    # A tenth of the test targets is wrong, so that the loss can explode. The tests are
    # training examples, which is a finding, too.
    wrong = ground.targets.clone()
    wrong[::10] = (wrong[::10] + 1) % 10
    tests = [[(ground.inputs, wrong)]]
    return diagnose(ground.model, ground.equal(), test_loaders=tests)


def constant_features(ground: Ground) -> Diagnosis:
    ground.inputs = torch.cat([torch.zeros(800, 40), ground.inputs[:, 20:44]], 1)
    model = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10)).train()
    # With momentum 0.1 the running variance of a constant feature falls from 1 to 1e-7
    # in 150 batches.
    for _ in range(150):
        model(ground.inputs[:64])
    return diagnose(model.eval(), [ground.batch(0, 32), ground.batch(32, 64)])


def unmoved(momentum: float) -> Callable[[Ground], Diagnosis]:
    """The statistics are still initial without momentum, or if they are never sent."""

    def plant(ground: Ground) -> Diagnosis:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(32, momentum=momentum)
        model = nn.Sequential(nn.Linear(64, 32), norm, nn.ReLU(), nn.Linear(32, 10))
        ground.inputs = 3 * ground.inputs - 5
        learn(model, ground.inputs, ground.targets, epochs=3, batch_size=8)
        model.eval()
        norm.running_mean.zero_()
        norm.running_var.fill_(1.0)
        assert ids(diagnose_state(model.state_dict())) == ["unmoved-statistics"]
        # In their order, the digits of other people have other shapes.
        return diagnose(model, ground.equal(batch_size=200))

    return plant


def nan_inputs(ground: Ground) -> Diagnosis:
    """Inputs with NaN stop all other measures.

    An empty answer would look like health.
    """
    ground.inputs = ground.inputs.clone()
    ground.inputs[53, 7] = float("nan")  # an example of client b
    starts = {"a": 0, "b": 50, "c": 100}
    loaders = {name: ground.batch(at, at + 50) for name, at in starts.items()}
    return diagnose(ground.model, loaders)


def nan_weight(ground: Ground) -> Diagnosis:
    with torch.no_grad():
        ground.model[3].weight[0, 0] = float("nan")
    return diagnose(ground.model, ground.by_class())


def filter_on_names(ground: Ground) -> Diagnosis:
    model = resnet18()
    local = [name for name in model.state_dict() if "bn" in name]
    return diagnose_state(model.state_dict(), model=model, local_keys=local)


def split_with_a_prefix(ground: Ground) -> Diagnosis:
    """The local keys have a wrapper's prefix."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    local = [f"module.{name}" for name in model.state_dict() if name.startswith("1.")]
    return diagnose_state(model.state_dict(), model=model, local_keys=local)


def spoiled_statistics(ground: Ground) -> Diagnosis:
    """Return statistics as a server optimizer may spoil them."""
    state = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)).state_dict()
    state["0.running_var"] -= 1.5
    state["1.running_var"] = torch.tensor([-2.0, float("nan")])
    return diagnose_state(state)


def label_skew(**options: Any) -> Callable[[Ground], Diagnosis]:
    return lambda ground: diagnose(ground.model, ground.by_class(), **options)


@dataclass(frozen=True)
class Fault:
    """A planted fault and the expected findings.

    ``found`` is the first finding, ``remedy`` its first remedy, ``numbers`` some of its
    numbers and ``all`` the list of all findings, if given. No finding may advise
    ``never``, because it would keep the fault.
    """

    plant: Callable[[Ground], Diagnosis]
    found: str
    remedy: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    all: tuple[str, ...] = ()
    never: str = "nothing"


UNMOVED = ("unmoved-statistics", "train-test-mismatch")
FAULTS = {
    "train mode": Fault(
        lambda ground: diagnose(ground.model.train(), ground.equal()),
        "tested-with-batch-statistics",
        "model.eval()",
        {"layers": ["1", "4"]},
    ),
    "no statistics": Fault(
        no_running_statistics,
        "tested-with-batch-statistics",
        "track_running_stats=True",
    ),
    "frozen backbone": Fault(
        frozen_backbone,
        "frozen-but-moving",
        "train-only=6",
        {"layers": ["1", "4"]},
        all=("frozen-but-moving",),
    ),
    "batches of two": Fault(
        lambda ground: diagnose(ground.model, ground.equal(batch_size=2)),
        "small-batch",
        "batch-size=16",
    ),
    "clients below a batch": Fault(clients_below_a_batch, "small-batch", ""),
    "averaged counters": Fault(
        averaged_counters,
        "averaged-counters",
        "leave integer entries out of the average",
    ),
    "tiny variance": Fault(
        tiny_variance,
        "extreme-variance",
        "recalibrate=true",
        all=("extreme-variance", "damaged-data", "train-test-mismatch"),
    ),
    "constant features": Fault(
        constant_features, "extreme-variance", "scale the inputs"
    ),
    "momentum of 0": Fault(
        unmoved(0.0),
        "unmoved-statistics",
        "bn-momentum=0.1",
        all=UNMOVED,
        never="fixbn",
    ),
    "statistics not sent": Fault(
        unmoved(0.1),
        "unmoved-statistics",
        "send and average the running statistics",
        all=UNMOVED,
        never="fixbn",
    ),
    "weight with NaN": Fault(nan_weight, "unusable-statistics", "lower learning-rate"),
    "filter on names": Fault(
        filter_on_names,
        "name-filter",
        "fedbn_flwr.split_state(model)",
        {"layers": [f"layer{n}.0.downsample.1" for n in (2, 3, 4)]},
    ),
    "split with a prefix": Fault(
        split_with_a_prefix,
        "name-filter",
        "fedbn_flwr.split_state(model)",
        {"layers": ["2"]},
    ),
    "spoiled statistics": Fault(
        spoiled_statistics,
        "unusable-statistics",
        "keep running statistics out of the server's optimizer",
    ),
    # The remedy for the same data depends on the local steps. With one step a round,
    # FedTAN is centralised training. With more steps, FixBN acts in every step.
    "label skew": Fault(
        label_skew(), "label-skew", "strategy=fixbn lr-decay-at=freeze"
    ),
    "label skew, one step": Fault(
        label_skew(training=Training(local_steps=1)), "label-skew", "strategy=fedtan"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_first_with_its_remedy(
    name: str, ground: Ground
) -> None:
    fault = FAULTS[name]
    found = fault.plant(ground)
    first = found.findings[0]
    assert first.id == fault.found
    assert first.remedies[0].setting == (fault.remedy or first.remedies[0].setting)
    assert first.numbers.items() >= fault.numbers.items()
    assert fault.all in ((), tuple(ids(found)))
    advised = [remedy.setting for one in found.findings for remedy in one.remedies]
    assert not any(fault.never in setting for setting in advised)


@pytest.mark.parametrize("untracked", ["the first", "the last"])
@pytest.mark.parametrize("fault", ["label-skew", "train-test-mismatch"])
def test_a_layer_without_running_statistics_hides_no_other_fault(
    untracked: str, fault: str, ground: Ground
) -> None:
    model = ground.model
    place, other, width = (1, 4, 48) if untracked == "the first" else (4, 1, 32)
    model[place] = nn.BatchNorm1d(width, track_running_stats=False).eval()
    loaders = ground.by_class()
    if fault == "train-test-mismatch":
        layer, loaders = model[other], ground.equal(200)
        signs = (-1) ** torch.arange(layer.num_features)
        layer.running_mean += 2 * layer.running_var.sqrt() * signs
    found = ids(diagnose(model, loaders))
    assert fault in found
    assert found[0] == "tested-with-batch-statistics"
    assert ("label-skew" in found) == (fault == "label-skew"), "no false alarm"


def _gap(running_accuracy: float | None, running: float, batch: float) -> Measurements:
    batch_accuracy = None if running_accuracy is None else 0.9
    return Measurements(
        gap=Mismatch(100, running, batch, running_accuracy, batch_accuracy, 9.0)
    )


@pytest.mark.parametrize(
    ("measured", "found"),
    [
        (_gap(0.84, 0.3, 0.2), True),
        (_gap(0.88, 0.3, 0.2), False),
        (_gap(0.90, 4.0, 0.2), True),  # wrong answers with high certainty
        (_gap(0.88, 0.8, 0.2), False),
        (_gap(None, 0.3, 0.2), True),
        (_gap(None, 0.22, 0.2), False),
        (_gap(None, -2.41, -2.43), False),  # a negative loss
        (_gap(None, -1.0, -2.43), True),
    ],
)
def test_how_much_a_mismatch_loses(measured: Measurements, found: bool) -> None:
    assert (train_test_mismatch(measured) is not None) == found


# The doctor must not accuse these models.


def eps_of_1(ground: Ground) -> Diagnosis:
    for layer in (ground.model[1], ground.model[4]):
        layer.eps = 1.0
    return diagnose_state(ground.model.state_dict(), model=ground.model)


def few_extreme_channels(ground: Ground) -> Diagnosis:
    with torch.no_grad():
        ground.model[1].running_var[0] = 1e-9
    return diagnose(ground.model, ground.equal())


SOUND = {
    "an eps of 1": (eps_of_1, "extreme-variance"),
    "a few extreme channels": (few_extreme_channels, "extreme-variance"),
    "a skew that is handled": (
        label_skew(
            training=Training(method="fixbn", handled=frozenset({"label-skew"}))
        ),
        "label-skew",
    ),
    # It is not the model of the training.
    "a model that does not train": (
        lambda ground: diagnose(ground.model.requires_grad_(False), ground.equal()),
        "frozen-but-moving",
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_is_no_fault_is_not_found(name: str, ground: Ground) -> None:
    plant, wrong = SOUND[name]
    assert wrong not in ids(plant(ground))


class _Extra(nn.Module):
    """Add a mask of -inf as a buffer and a mapping to the state, but no weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mask", torch.full((2, 2), -torch.inf))

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def test_nothing_is_found_in_a_healthy_model_and_nothing_changes(
    ground: Ground,
) -> None:
    model = _Extra(ground.model).eval()
    before = copy.deepcopy(ground.model.state_dict())
    draws = torch.get_rng_state()
    found = diagnose(model, ground.equal(), state=model.state_dict())
    assert (found.findings, found.not_measured) == ([], [])
    assert "Nothing found." in str(found)
    assert torch.equal(torch.get_rng_state(), draws)
    assert not model.training
    torch.testing.assert_close(ground.model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("held", [(1,), (1, 4)])
def test_a_layer_that_is_held_in_eval_mode_is_not_accused(
    held: tuple[int, ...], ground: Ground
) -> None:
    """A layer in eval mode normalises by fixed statistics during training.

    Neither the batch size nor the other clients' data change it.
    """
    model = ground.model
    for index in held:
        force_eval(model[index])
    assert eval_layers(model) == [str(index) for index in held]
    found = diagnose(model, ground.by_class(batch_size=2))
    assert ids(found)[:2] == (["small-batch", "label-skew"] if held == (1,) else [])
    assert all(finding.numbers["layer"] == "4" for finding in found.findings[:1])
    assert ("sites" in found.measures) == (held == (1,))


def test_a_shared_layer_has_the_findings_of_two_equal_layers() -> None:
    """The faults are no momentum, no statistics and frozen weights. One row has no fault."""
    options = [{"momentum": 0.0}, {"track_running_stats": False}, {}, {"eps": 1e-8}]
    kinds = [nn.BatchNorm1d(2, **each) for each in (*options, {"momentum": 0.0})]
    force_eval(kinds[4])
    for kind in (kinds[0], kinds[4]):
        kind.num_batches_tracked += 1
    kinds[2].requires_grad_(False)
    kinds[3].running_var *= 1e-7
    found = []
    for again in (kinds, copy.deepcopy(kinds)):
        model = nn.Sequential(*kinds, *again)
        seen = diagnose_state(model.state_dict(), model=model).findings
        found.append([(one.id, one.evidence, one.numbers) for one in seen])
    assert found[0] == found[1]
    layers = [{*numbers["layers"]} for *_, numbers in found[0]]
    assert layers == [{"1", "6"}, {"2", "7"}, {"0", "4", "5", "9"}]
    assert {*found[0][-1][-1]["momentum-0"]} == {"0", "5"}


# Some parts cannot be measured.


def no_batch(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.squeeze().dim() < 2:
        raise ValueError("no batch")
    return nn.functional.cross_entropy(outputs.squeeze(), targets)


def layered(
    ground: Ground, width: int = 64, shift: int = 0, **options: Any
) -> Diagnosis:
    """Diagnose a network with one BatchNorm layer over two clients.

    The last batch has one example.
    """
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)).eval()
    given = Ground(model, ground.inputs[:, :width], ground.targets + shift)
    return diagnose(model, [given.batch(0, 64), given.batch(64, 129)], **options)


def one_test(ground: Ground) -> Diagnosis:
    return layered(ground, test_loaders=[ground.batch(0, 1)])


def two_targets(ground: Ground) -> Diagnosis:
    ground.targets = torch.stack([ground.targets, ground.targets], 1)
    return diagnose(ground.model, ground.equal())


NOT_MEASURED = {
    "two clients": (layered, []),
    "a state only": (
        lambda ground: diagnose_state(ground.model.state_dict()),
        ["checks that need data", "BatchNorm layers without"],
    ),
    "a loss that fails": (
        lambda ground: layered(ground, loss=no_batch),
        ["mismatch of training and test"],
    ),
    "labels from 1": (
        lambda ground: layered(ground, shift=1),
        ["mismatch of training and test"],
    ),
    "one test": (one_test, ["mismatch of training and test"]),
    "a wrong width": (
        lambda ground: layered(ground, width=60),
        ["statistics of the batches", "mismatch"],
    ),
    "no BatchNorm": (
        lambda ground: diagnose(nn.Linear(64, 10), ground.equal()),
        ["BatchNorm, because"],
    ),
    "inputs with NaN": (
        nan_inputs,
        ["checks that need data, because inputs contain NaN or infinity (Client b)."],
    ),
    "targets without a loss": (
        two_targets,
        ["label skew", "mismatch of training and test"],
    ),
}


@pytest.mark.parametrize("name", NOT_MEASURED)
def test_a_measurement_that_fails_leaves_the_others(name: str, ground: Ground) -> None:
    """If a part was not measured, the lack of findings does not prove health."""
    plant, lacking = NOT_MEASURED[name]
    found = plant(ground)
    if lacking:
        assert "Nothing found." not in str(found)
    assert len(found.not_measured) == len(lacking), found
    for line, start in zip(found.not_measured, lacking, strict=True):
        assert line.startswith(start)


# Loaders, answers and states.


LAZY = nn.Sequential(nn.Linear(64, 8), nn.LazyBatchNorm1d(), nn.Linear(8, 10))
REFUSED = {
    "a state of another model": (
        lambda ground: diagnose(
            ground.model, ground.equal(), state={"1.running_var": torch.ones(48)}
        ),
        StateError,
        "does not fit the model",
    ),
    "a layer without a shape": (
        lambda ground: diagnose(LAZY, ground.equal()),
        StateError,
        "1.weight",
    ),
    "no examples": (
        lambda ground: diagnose(ground.model, []),
        ConfigError,
        "client_loaders",
    ),
    "no examples wanted": (
        lambda ground: diagnose(ground.model, ground.equal(), max_examples=0),
        ConfigError,
        "client_loaders",
    ),
    "one loader": (
        lambda ground: diagnose(ground.model, ground.equal()[0]),
        DataError,
        "a list with one loader",
    ),
    "one test loader": (
        lambda ground: diagnose(
            ground.model, ground.equal(), test_loaders=[*ground.equal()[0]]
        ),
        DataError,
        "a list with one loader",
    ),
    "an unknown name": (
        lambda ground: diagnose_state(
            ground.model.state_dict(), model=ground.model, local_keys=["bn.weight"]
        ),
        ConfigError,
        "local_keys",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_diagnosed_is_refused(name: str, ground: Ground) -> None:
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        call(ground)


def test_a_client_without_examples_is_left_out(ground: Ground) -> None:
    loaders = ground.equal()
    found = diagnose(
        ground.model, [*loaders[:2], []], test_loaders={"x": [], "y": loaders[2]}
    )
    assert found.measures["clients"] == ["0", "1"]
    assert found.notes == ["left out: 2 loaders without examples."]


def test_saved_states_of_every_format(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict()
    wrapped = {f"module.{name}": value for name, value in state.items()}
    save_file(state, tmp_path / "a.safetensors")
    torch.save({"state_dict": wrapped, "epoch": 3}, tmp_path / "b.pt")
    np.savez(tmp_path / "c.npz", **{name: one.numpy() for name, one in state.items()})
    for file in tmp_path.iterdir():
        read = named(read_state_file(file), state)
        assert all(torch.equal(read[name], value) for name, value in state.items())
    broken = tmp_path / "b.pt"
    broken.write_bytes(b"no state")
    with pytest.raises(StateError, match=broken.name):
        read_state_file(broken)
