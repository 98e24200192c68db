"""``dataset=module:function`` gets the data of each site from a user's function."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.config import Config, data_of
from fedbn_flwr.lab.partitioned.partitioned_data import load_data, partitioned_data
from fedbn_flwr.lab.results.same_data import sha256_of_data
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.training.losses import IGNORED_PIXEL
from tests.support.options import kebab
from tests.support.runs import QUICK, lines_of
from tests.support.tables import Pairs, generator_of, named

VOLUMES = {
    "task": "segmentation",
    "num-classes": 2,
    "model": f"{__name__}:unet",
    "num-clients": 2,
}
ZEROS, ONE = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)


def rows(site: int | str, part: str) -> Pairs:
    """Return rows of 3 features and 2 classes.

    The site of a path is its last character.
    """
    number = int(str(site)[-1])
    inputs = torch.randn(12 + number, 3, generator=generator_of(number, part))
    classes = (inputs[:, 0] > 0).long()
    return Pairs(
        inputs,
        classes,
        targets=classes,
        groups=[f"p{at // 2}" for at in range(len(inputs))],
    )


def volumes(site: int, part: str) -> TensorDataset:
    """Return 4 x 6 x 8 volumes. Bright voxels have class 1, and one has none."""
    inputs = torch.rand(4, 1, 4, 6, 8, generator=generator_of(site, part))
    classes = (inputs > 0.6).long()
    classes[0, 0, 0, 0, 0] = IGNORED_PIXEL
    return TensorDataset(inputs, classes)


def unet(
    num_classes: int, channels: int, depth: int, height: int, width: int
) -> nn.Module:
    assert (depth, height, width) == (4, 6, 8)
    first = nn.Conv3d(channels, 4, 3, padding=1)
    return nn.Sequential(
        first, nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, num_classes, 1)
    )


def config_of(**settings) -> Config:
    return Config.make({**QUICK, "dataset": f"{__name__}:rows", **kebab(settings)})


def test_each_site_is_a_client_with_its_own_test_part_and_groups() -> None:
    """A held-out client is one site more. Inputs are not standardised."""
    config = config_of(num_clients=3, held_out_clients="1")
    split = partitioned_data(config, 3)
    views = [(split.train_view(site), split.test_view(site)) for site in range(3)]
    for site, pair in enumerate([*views, split.held_out_views(0)]):
        for part, view in zip(("train", "test"), pair, strict=True):
            inputs, targets = view.batch(torch.arange(len(view)))
            expected = rows(site, part)
            assert torch.equal(inputs, expected.inputs)
            assert torch.equal(targets, expected.targets)
    units = split.dataset.train.units
    assert units[:12].tolist() == [at // 2 for at in range(12)]
    assert split.held_out_names == ("site-3",)
    data = data_of(config)
    assert (data.split_name, data.num_outputs, data.shape) == ("natural", 2, (3,))


def test_targets_are_known_from_one_example_of_each_class(monkeypatch) -> None:
    sets = {part: rows(0, part) for part in ("train", "test")}
    name = named(monkeypatch, lambda site, part: sets[part])
    data = load_data(config_of(dataset=name, num_clients=1))
    assert data.train.labels.equal(sets["train"].targets)
    # The first input is read for the shape and for the check of each site, and an
    # input of each of the two classes.
    assert sets["train"].reads <= 2 + 2


def test_targets_that_the_data_set_transforms_are_those_of_its_examples(
    monkeypatch,
) -> None:
    """``targets`` has the classes before ``target_transform``, as in torchvision."""
    inputs, before = torch.randn(12, 3), torch.arange(12) % 6
    parity = Pairs(inputs, before % 2, targets=before)
    name = named(monkeypatch, lambda site, part: parity)
    data = load_data(config_of(dataset=name, num_clients=1, task="binary"))
    assert data.train.take(torch.arange(12))[1].flatten().tolist() == [0, 1] * 6


def test_volumes_train_with_a_class_for_each_voxel(tmp_path) -> None:
    settings = {"optimizer": "adam", "learning-rate": 0.05, "local-steps": 10}
    settings |= {"strategy": "fedbn", "num-server-rounds": 5, "batch-size": 2}
    config = config_of(dataset=f"{__name__}:volumes", **VOLUMES, **settings)
    assert load_data(config).train.by_pixel
    run(config, tmp_path, workers=0)
    first, *_, last = lines_of(tmp_path)
    key = next(key for key in last if key.endswith("miou"))
    assert last[key] > max(first[key], 0.5)
    assert f"{key}/site-1" in last


class Failing(Pairs):
    def __getitem__(self, at: int):
        raise OSError("scan.nii is damaged")


def of(inputs, targets, kind: type = Pairs) -> Callable:
    return lambda site, part: kind(inputs, targets)


def other_at_site_1(site: int, part: str) -> Pairs:
    return Pairs(torch.zeros(4, 3 + site), ONE, targets=ONE.numpy())


states_five, names_five = functools.partial(rows), functools.partial(rows)
states_five.input_shape = (5,)
names_five.columns = ["age", "crp", "hb", "dose", "sex"]


BAD = {
    "another shape at one site": (
        other_at_site_1,
        {},
        "site 1, part 'train', example 0",
    ),
    "an item that cannot be read": (of(ZEROS, ONE, Failing), {}, "scan.nii is damaged"),
    "no pair": (lambda site, part: [1, 2], {}, "pair of input and target"),
    "no data set": (lambda site, part: 3, {}, "returned a int"),
    "a function that raises": (lambda site, part: {}[site], {}, "KeyError"),
    "bytes": (of(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), ONE), {}, "torch.uint8"),
    "complex": (
        of(torch.full((4, 3), 1j), ONE),
        {},
        "complex numbers (torch.complex64)",
    ),
    "infinite": (of(torch.tensor([[0.0, torch.inf, 0.0]] * 4), ONE), {}, "NaN or inf"),
    "targets that are texts": (
        of(ZEROS, ["ill"] * 4),
        {},
        "site 0, part 'train', example 0: TypeError: 'ill' is not a number",
    ),
    "a class too many": (of(ZEROS, ONE + 2), {"num_classes": 2}, "0 to 1"),
    "groups of other examples": (
        lambda site, part: Pairs(ZEROS, ONE, groups=[1, 2]),
        {},
        "2 values for 4 examples",
    ),
    "masks of another size": (
        of(torch.zeros(2, 1, 4, 4, 4), torch.zeros(2, 4, 4, 3, dtype=torch.int64)),
        {"task": "segmentation", "num_classes": 2, "model": f"{__name__}:unet"},
        "(4, 4, 4)",
    ),
    "masks whose classes nobody states": (
        of(torch.zeros(2, 1, 4, 4), torch.zeros(2, 4, 4, dtype=torch.int64)),
        {"task": "segmentation"},
        "num-classes",
    ),
    "targets that say nothing": (of(ZEROS, torch.zeros(4)), {}, "task="),
    "targets of a user's task": (of(ZEROS, torch.zeros(4, 2)), {}, "task=module:NAME"),
    "no number of sites": (rows, {"num_clients": 0}, "num-clients"),
    "another shape than the function's": (
        states_five,
        {},
        "but the run has (5,)",
    ),
    "names of other columns": (names_five, {}, "columns has 5 names"),
    "no test examples": (
        lambda site, part: Pairs(ZEROS, ONE) if part == "train" else Pairs([], []),
        {},
        "part 'test'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_before_round_1(monkeypatch, tmp_path, case: str) -> None:
    function, settings, text = BAD[case]
    name, out = named(monkeypatch, function), tmp_path / "out"
    with pytest.raises((ConfigError, DataError)) as raised:
        run(config_of(dataset=name, **{"num_clients": 2, **settings}), out)
    assert text in str(raised.value)
    assert not out.exists()


class Grows(TensorDataset):
    """A data set that adds 1 to an input at each reading, as augmentation changes it."""

    def __getitem__(self, at: int):
        self.tensors[0][at] += 1
        return super().__getitem__(at)


def test_an_example_is_read_anew_unless_all_sites_have_tensors(monkeypatch) -> None:
    for case in range(4):
        kinds = [(TensorDataset, Grows)[case >> site & 1] for site in range(2)]
        sets = [kind(torch.zeros(4, 3), ONE) for kind in kinds]
        name = named(monkeypatch, lambda site, part, of=sets: of[site])
        train = load_data(config_of(dataset=name, num_clients=2)).train
        first, second = (train.take(torch.arange(8))[0].sum(1) for _ in range(2))
        grown = (second > first).tolist()
        assert grown == [kind is Grows for kind in kinds for _ in ONE]


@pytest.mark.parametrize("case", range(8))
def test_examples_have_one_unit_if_they_have_one_group(monkeypatch, case: int) -> None:
    """Each patient has two examples at each site. The digest depends on the groups."""
    groups = {}

    def some(site: int, part: str) -> Pairs:
        data = rows(site, part)
        groups[site, part] = [(site, at) for at in range(len(data))]
        if case >> site & 1:
            groups[site, part] = data.groups
        else:
            del data.groups
        return data

    config, whole = (
        config_of(dataset=named(monkeypatch, function), num_clients=3)
        for function in (some, rows)
    )
    units = load_data(config).train.units
    assert (units is None) == (case == 0)
    if units is not None:
        known = [group for site in range(3) for group in groups[site, "train"]]
        both = {*zip(known, units.tolist(), strict=True)}
        assert len(both) == len({*known}) == len({*units.tolist()})
    assert (sha256_of_data(config) == sha256_of_data(whole)) == (case == 7)


@pytest.mark.parametrize("where", ["train", "test"])
def test_the_classes_of_both_parts_count(monkeypatch, where: str) -> None:
    def last(site: int, part: str) -> Pairs:
        return Pairs(ZEROS, ONE + 4 * (part == where))

    name = named(monkeypatch, last)
    assert data_of(config_of(dataset=name, num_clients=1)).num_outputs == 5


@pytest.mark.parametrize("strategy", ["fedavg", "scaffold", "fedtan", "centralized"])
def test_validation_examples_are_in_no_sum(
    strategy: str, monkeypatch, tmp_path
) -> None:
    """Other validation examples give the same model, statistics and test."""
    settings = {"strategy": strategy, "model": "mlp", "validation_share": 0.25}
    settings["recalibrate"] = strategy == "fedavg"
    config = config_of(**settings)
    validation = np.concatenate(partitioned_data(config, 3).validation)

    def spoilt(site: int, part: str) -> Pairs:
        data = rows(site, part)
        if part == "train":
            begin = sum(len(rows(other, "train")) for other in range(site))
            spoilt_rows = np.isin(begin + np.arange(len(data)), validation)
            assert spoilt_rows.any()
            data.inputs[spoilt_rows] = 1e3
        return data

    other = config_of(dataset=named(monkeypatch, spoilt), **settings)
    found = [run(one, tmp_path / one.dataset) for one in (config, other)]
    assert found[0]["sha256"] == found[1]["sha256"]
    ours, theirs = (one["final"] for one in found)
    changed = {name for name in ours if ours[name] != theirs[name]}
    validated = {name for name in ours if "validation" in name}
    losses = {name for name in validated if name.endswith("validation-loss")}
    assert changed
    assert losses <= changed <= validated
