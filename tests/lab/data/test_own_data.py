"""Layouts, clients, units, splits and targets of own data.

Bad input is refused before any work.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.config import Config, listed
from fedbn_flwr.lab.data import OwnData, load_dataset, own_info
from fedbn_flwr.lab.data.datasets import DatasetInfo
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.lab.runs.check_start import checked_config
from tests.support.tables import in_places, table, write_images


def info_of(path: Path, **keys: object) -> DatasetInfo:
    return own_info(OwnData("folder", str(path), **keys))


LAYOUTS = {
    "class": ({"cat": 5, "dog": 10}, (), None),
    "client/class": ({"a/cat": 5, "a/dog": 5, "b/dog": 10}, ("a", "b"), None),
    "client/part/class": (
        {"a/train/cat": 3, "a/test/cat": 1, "b/train/dog": 4, "b/test/dog": 2},
        ("a", "b"),
        3,
    ),
    "part/class": (
        {"train/cat": 3, "test/cat": 1, "train/dog": 4, "test/dog": 2},
        (),
        3,
    ),
}


@pytest.mark.parametrize(
    ("folders", "classes"),
    [
        # A class may be called train.
        ({"bus": 3, "train": 3}, ("bus", "train")),
        # Two classes have one spelling, and both folders at one site.
        ({"a/x": 2, "a/X": 0, "b/X": 2}, ("X", "x")),
    ],
)
def test_classes_that_look_like_something_else(
    tmp_path, folders: dict[str, int], classes: tuple[str, ...]
) -> None:
    write_images(tmp_path, folders)
    assert info_of(tmp_path).class_names == classes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_image_folders(tmp_path, layout: str) -> None:
    """Empty folders of an archive are not classes in other layouts."""
    folders, clients, tests = LAYOUTS[layout]
    write_images(tmp_path, folders)
    for depth in {1, 2, 3, 4} - {len(layout.split("/"))}:
        tmp_path.joinpath(*[f"__MACOSX{depth}"] * depth).mkdir(parents=True)
    info = info_of(tmp_path)
    data = load_dataset(info, size=4)
    facts = (info.class_names, info.size, info.channels, data.group_names)
    assert facts == (("cat", "dog"), 4, 3, clients)
    total = sum(folders.values())
    assert len(data.train) + len(data.test) == total
    assert len(data.test) == (round(0.2 * total) if tests is None else tests)
    labels = torch.cat([data.train.labels, data.test.labels])
    dogs = sum(count for folder, count in folders.items() if folder.endswith("dog"))
    assert torch.bincount(labels).tolist() == [total - dogs, dogs]
    for samples in (data.train, data.test):
        if clients:
            b = samples.groups == clients.index("b")
            assert (samples.labels[b] == 1).all()  # client b has only dogs


@pytest.mark.parametrize(
    "names", [["01", "001", "1.1", "1.10"], ["0E8", "0E3", "1e2", "100"]]
)
def test_sites_that_are_one_number_stay_four_sites(tmp_path, names: list[str]) -> None:
    write_images(tmp_path, in_places(2, *names))
    assert info_of(tmp_path).client_names == tuple(sorted(names))


def test_units_stay_together_in_every_split(monkeypatch) -> None:
    rng = np.random.default_rng(1)
    units = rng.integers(0, 30, 200)
    x = rng.normal(size=(200, 3))
    # A patient may have rows at several sites.
    sites = np.arange(200) % 4
    dataset = table(monkeypatch, x, units % 3, sites, units % 5 == 0, units)
    settings = {"dataset": dataset, "validation-share": 0.2, "num-clients": 4}
    for partition in ("iid", "dirichlet-equal", "studies.shards:balanced"):
        split = partitioned_data(Config.make({**settings, "partition": partition}), 4)
        homes = []
        for samples, parts in (
            (split.dataset.train, [*split.train, *split.validation]),
            (split.dataset.test, split.test),
        ):
            homes += [{*samples.units[part].tolist()} for part in parts]
            assert sum(map(len, parts)) == len(samples)
        assert sum(map(len, homes)) == len(set().union(*homes)), partition


TWO = {"a": 2, "b": 2}


def _folder(
    tmp_path: Path, folders: dict[str, int], **keys: object
) -> dict[str, object]:
    dataset = write_images(tmp_path / "bad", folders)
    return {"dataset": dataset, "model": "lenet", **keys}


def _cut_off(tmp_path: Path) -> dict[str, object]:
    settings = _folder(tmp_path, TWO)
    for path in tmp_path.glob("bad/*/1.png"):
        path.write_bytes(path.read_bytes()[:40])
    return settings


FOLDERS = {
    "a part without images": ({"train/a": 1, "train/b": 1}, "no test images"),
    "a class in two spellings": (
        {"x/Tumor": 1, "x/a": 1, "y/tumor": 1, "y/a": 1},
        "'Tumor', 'tumor', differ only in .*one class, rename",
    ),
    "a part in another spelling": (
        {"train/Tumor": 1, "train/a": 1, "test/TUMOR": 1, "test/a": 1},
        "'TUMOR', 'Tumor', differ only in",
    ),
    "a class in two encodings": (
        {"x/\xdcbel": 1, "x/a": 1, "y/U\u0308bel": 1, "y/a": 1},
        r"'U.u0308bel', '.xdcbel', differ only in",
    ),
    "one class": ({"a": 3}, "two or more classes, .*a"),
    "images without a class": ({".": 2}, "images are in \\."),
    "layouts mixed": ({"x/a": 1, "x/b": 1, "b": 1}, "the same layout"),
    "a validation folder": (
        {"train/a": 1, "val/a": 1, "train/b": 1},
        "images are in val/a.*validation-share",
    ),
    "parts below the classes": (
        {"cat/train": 1, "cat/test": 1, "dog/train": 1, "dog/test": 1},
        "test, train.*train/class/file",
    ),
    "parts without classes": (
        {"Train": 1, "val": 1, "other": 1},
        "Train, other, val.*train/class/file",
    ),
    "too deep": ({"x/y/a": 1, "x/y/b": 1}, "images are in x/y/"),
    "a class without images": (
        {"a": 2, "b": 2, "c": 0},
        "two or more classes.*c.*folder of a class is empty, also set num-classes",
    ),
}
BAD = {
    "unknown kind": (lambda p: {"dataset": f"fodler:{p}"}, "'fodler'.*'folder'"),
    "absent path": (lambda p: {"dataset": f"folder:{p / 'no'}"}, "no such folder"),
    "relative path": (lambda p: {"dataset": "folder:a"}, "'folder:a'.*'folder:/"),
    "task that does not fit": (
        lambda p: _folder(p, TWO, task="multi-label"),
        "task=multi-label",
    ),
    "a folder too many for two": (
        lambda p: _folder(p, {**TWO, "c": 2}, task="binary"),
        "task=binary needs 2 classes.*a, b, c.*task=classification",
    ),
    "damaged files": (_cut_off, "2 image files .*\n.*a/1.png.*\n.*b/1.png"),
    "a class without a folder": (
        lambda p: _folder(p, {"x/a": 2, "x/b": 2}, **{"num-classes": 3}),
        "num-classes is 3.*a, b.*may be empty",
    ),
    "nodes' data undescribed": (lambda p: {"dataset": "folder:"}, "image-size, task"),
}


def test_most_images_decide_the_size_and_others_are_told_once(tmp_path, caplog) -> None:
    """The first image is a thumbnail."""
    for number, size in enumerate([(12, 12), *[(96, 96)] * 5]):
        write_images(tmp_path / f"{number}", {"cat": 1, "dog": 1}, size)
    info = info_of(tmp_path)
    assert info.size == 96
    for _ in range(2):
        load_dataset(info, channels=1, size=28)
    (told,) = [text for text in caplog.messages if "sizes" in text]
    for size in ("12x12", "96x96", "28x28"):
        assert size in told


@pytest.mark.parametrize("case", [*FOLDERS, *BAD])
def test_bad_input_is_named_before_any_work(tmp_path, case: str) -> None:
    if case in FOLDERS:
        folders, message = FOLDERS[case]
        settings = _folder(tmp_path, folders)
    else:
        make, message = BAD[case]
        settings = make(tmp_path)
    with pytest.raises((ConfigError, DataError), match=f"(?s){message}"):
        start(settings)


def start(settings: dict[str, object]) -> None:
    config = checked_config(Config.make(settings)).config
    partitioned_data(config, count_clients(config))


def test_an_empty_folder_holds_the_number_of_its_class(tmp_path) -> None:
    """A client without cats numbers its dogs as the other clients do."""
    write_images(tmp_path, {"cat": 0, "dog": 4})
    info = info_of(tmp_path, num_classes=2, test_share=0.25)
    assert info.class_names == ("cat", "dog")
    assert load_dataset(info).train.labels.tolist() == [1, 1, 1]


def test_names_with_commas_stand_in_quotes() -> None:
    assert listed('a, "b, c" ,d') == ["a", "b, c", "d"]
