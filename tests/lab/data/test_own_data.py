"""Own data: layouts, clients, units, splits, targets, features; and what bad input gets, before any work."""

from __future__ import annotations

import io
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.config import Config, read_overrides
from fedbn_flwr.lab.data import OwnData, load_dataset, loading, own_info
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.lab.runs.run import run


def write_images(root: Path, folders: dict[str, int], size: tuple[int, int] = (6, 4), suffix: str = "png") -> None:
    for number, (folder, count) in enumerate(folders.items()):
        (root / folder).mkdir(parents=True)
        for at in range(count):
            pixels = np.random.default_rng(100 * number + at).integers(0, 256, (*size[::-1], 3)).astype(np.uint8)
            Image.fromarray(pixels).save(root / folder / f"{at}.{suffix}")


def write_csv(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def own(kind: str, path: Path, **keys: object) -> OwnData:
    return OwnData(kind, str(path), **keys)


LAYOUTS = {
    "class": ({"cat": 5, "dog": 10}, (), None),
    "client/class": ({"a/cat": 5, "a/dog": 5, "b/dog": 10}, ("a", "b"), None),
    "client/part/class": ({"a/train/cat": 3, "a/test/cat": 1, "b/train/dog": 4, "b/test/dog": 2}, ("a", "b"), 3),
    "part/class": ({"train/cat": 3, "test/cat": 1, "train/dog": 4, "test/dog": 2}, (), 3),
}


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    write_images(tmp_path, {"bus": 3, "train": 3})
    assert own_info(own("folder", tmp_path)).class_names == ("bus", "train")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_image_folders(tmp_path: Path, layout: str) -> None:
    folders, clients, tests = LAYOUTS[layout]
    write_images(tmp_path, folders)
    info = own_info(own("folder", tmp_path))
    data = load_dataset(info, size=4)
    assert (info.num_classes, info.class_names, info.size, info.channels) == (2, ("cat", "dog"), 4, 3)
    assert data.group_names == clients
    total = sum(folders.values())
    assert len(data.train) + len(data.test) == total
    assert len(data.test) == (round(0.2 * total) if tests is None else tests)
    labels = torch.cat([data.train.labels, data.test.labels])
    for label, name in enumerate(("cat", "dog")):
        assert (labels == label).sum() == sum(count for folder, count in folders.items() if folder.endswith(name))
    for samples in (data.train, data.test):
        if clients:
            b = samples.groups == clients.index("b")
            assert (samples.labels[b] == 1).all()  # client b has dogs only


def test_masks_beside_images_are_classes_of_pixels(tmp_path: Path) -> None:
    write_images(tmp_path, {"x/images": 3, "y/images": 2})
    for client, count in (("x", 3), ("y", 2)):
        (tmp_path / client / "masks").mkdir()
        for at in range(count):
            Image.fromarray(np.full((4, 6), [0, 2, 255][at], np.uint8)).save(tmp_path / client / f"masks/{at}.png")
    info = own_info(own("folder", tmp_path))
    assert (info.task.name, info.num_classes) == ("segmentation", 3)
    data = load_dataset(info, size=6)
    assert data.train.by_pixel
    assert sorted(data.train.targets[:, 0, 0].tolist() + data.test.targets[:, 0, 0].tolist()) == [0, 0, 2, 2, 255]


TABLE = """age,sex,bmi,hospital,patient,target
50,F,20.5,north,1,0
60,M,,north,1,1
70,F,30.5,south,2,3
40,M,25.0,south,3,0
55,F,22.0,north,4,0
65,M,28.0,south,5,2
45,F,21.0,north,6,0
75,M,29.0,south,7,4
58,F,24.0,north,8,0
62,M,27.0,south,9,1
"""
KEYS = {
    "label_column": "target",
    "client_column": "hospital",
    "group_column": "patient",
    "positive_values": ">0",
    "missing": "mean",
}


def test_a_table_with_text_missing_values_clients_and_patients(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", TABLE)
    request = own("csv", path, **KEYS)
    info = own_info(request)
    assert info.feature_names == ("age", "sex=F", "sex=M", "bmi")
    assert (info.task.name, info.num_classes, info.input_shape) == ("binary", 1, (4,))
    data = load_dataset(info)
    assert data.group_names == ("north", "south")
    assert not set(data.train.units.tolist()) & set(data.test.units.tolist())
    rows = torch.cat([data.train.inputs, data.test.inputs])
    assert rows.isnan().sum() == 1
    assert sorted(rows[:, 0].tolist()) == sorted([50, 60, 70, 40, 55, 65, 45, 75, 58, 62])
    assert {row[1].item() + row[2].item() for row in rows} == {1.0}
    assert any("2 features (F, M)" in note for note in own_info(request).notes)
    labels = dict(zip(rows[:, 0].tolist(), torch.cat([data.train.targets, data.test.targets]).tolist(), strict=True))
    assert labels == {50: 0, 60: 1, 70: 1, 40: 0, 55: 0, 65: 1, 45: 0, 75: 1, 58: 0, 62: 1}


def test_a_folder_of_tables_has_a_client_for_each_and_parquet_is_the_same(tmp_path: Path) -> None:
    import pandas as pd

    for name, rows in (("b", "1.5,0\n2.5,1\n3,1\n?,0\n9,1\n"), ("a", "4,1\n5,0\n6,0\n7,1\n8,1\n")):
        write_csv(tmp_path / f"csv/{name}.csv", "x,y\n" + rows)
        (tmp_path / "parquet").mkdir(exist_ok=True)
        table = pd.read_csv(tmp_path / f"csv/{name}.csv", na_values="?")
        table.rename(columns=" {} ".format).to_parquet(tmp_path / f"parquet/{name}.parquet")
    found = [
        load_dataset(own_info(own("csv", tmp_path / kind, label_column="y", missing="mean")))
        for kind in ("csv", "parquet")
    ]
    for data in found:
        assert data.group_names == ("a", "b")
        assert len(data.test) == 2
    assert torch.equal(found[0].train.inputs.nan_to_num(-1), found[1].train.inputs.nan_to_num(-1))


def test_a_column_without_a_name_is_no_feature(tmp_path: Path) -> None:
    """Pandas writes the numbers of the rows so, which would tell the order of the file."""
    path = write_csv(tmp_path / "t.csv", ",x,target\n0,1,0\n1,2,1\n2,3,0\n3,5,1\n")
    request = own("csv", path, label_column="target")
    assert own_info(request).feature_names == ("x",)
    assert any("'Unnamed: 0' has no name in the file and is left out" in note for note in own_info(request).notes)


def test_arrays_of_every_form(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    count = 20
    images = rng.integers(0, 256, (count, 5, 5)).astype(np.uint8)
    cases = {
        "classes": (images, rng.integers(0, 3, count), "classification", 3),
        "text": (images, np.array(["a", "b"] * 10), "classification", 2),
        "rows": (rng.normal(size=(count, 4)), rng.normal(size=count), "regression", 1),
        "labels": (rng.normal(size=(count, 4)), rng.integers(0, 2, (count, 3)), "multi-label", 3),
        "a column of classes": (images, (np.arange(count) % 10)[:, None].astype(np.uint8), "classification", 10),
        "signals": (rng.normal(size=(count, 2, 9)), rng.normal(size=(count, 2)), "regression", 2),
        "pixels": (images, np.where(images > 200, 255, images % 4), "segmentation", 4),
    }
    for name, (x, y, task, outputs) in cases.items():
        np.savez(tmp_path / f"{name}.npz", x=x, y=y, client=np.arange(count) % 2, split=np.arange(count) >= 15)
        info = own_info(own("npz", tmp_path / f"{name}.npz"))
        data = load_dataset(info)
        assert (info.task.name, info.num_classes) == (task, outputs), name
        assert (len(data.train), len(data.test)) == (15, 5)
        assert data.train.groups.tolist() == [at % 2 for at in range(15)]
        expected = torch.from_numpy(x[:15].astype(np.uint8 if x.dtype == np.uint8 else np.float32))
        assert torch.equal(data.train.inputs.flatten(1), expected.flatten(1)), name


def test_patients_of_two_hospitals_with_one_number_are_two(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    client, patient = np.repeat([0, 1], 40), np.concatenate([np.arange(40) // 2, np.arange(40)])
    np.savez(tmp_path / "a.npz", x=rng.normal(size=(80, 3)), y=rng.integers(0, 2, 80), client=client, group=patient)
    config = Config.make({"dataset": f"npz:{tmp_path / 'a.npz'}"})
    data = partitioned_data(config, count_clients(config))
    groups, tests = data.dataset.train.groups.numpy(), data.dataset.test.groups.numpy()
    for own_client in (0, 1):
        assert (groups[data.train[own_client]] == own_client).all()
        assert len(data.train[own_client]) == (groups == own_client).sum()
        assert np.array_equal(data.test[own_client], np.flatnonzero(tests == own_client))


def test_a_natural_client_has_all_its_test_examples(tmp_path: Path) -> None:
    text = "x,y,site,part\n" + "1,0,a,train\n" * 4 + "2,0,a,test\n3,1,a,test\n4,0,b,train\n5,1,b,train\n6,1,b,test\n"
    path = write_csv(tmp_path / "t.csv", text)
    keys = {"dataset": f"csv:{path}", "label-column": "y", "client-column": "site", "split-column": "part"}
    data = partitioned_data(Config.make(keys), 2)
    assert [len(part) for part in data.test] == [2, 1]  # also of class 1, which site a does not train on
    held = partitioned_data(Config.make({**keys, "held-out-clients": "a"}), 1)
    assert len(held.test_view()) == 1


def test_units_stay_together_in_every_split(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    units = rng.integers(0, 30, 200)
    np.savez(tmp_path / "a.npz", x=rng.normal(size=(200, 3)), y=units % 3, group=units)
    settings = {"dataset": f"npz:{tmp_path / 'a.npz'}", "validation-share": 0.2, "num-clients": 4}
    for partition in ("iid", "dirichlet-equal", "shards"):
        split = partitioned_data(Config.make({**settings, "partition": partition}), 4)
        train_units = split.dataset.train.units.numpy()
        parts = [*split.train, *split.validation]
        homes = [set(train_units[part].tolist()) for part in parts] + [set(split.dataset.test.units.tolist())]
        assert sum(map(len, homes)) == len(set().union(*homes)), partition
        assert sum(len(part) for part in parts) == len(train_units)


def test_own_test_examples_do_not_depend_on_the_seed(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(60.0).reshape(30, 2), y=np.arange(30) % 2)
    first, second = (
        partitioned_data(Config.make({"dataset": f"npz:{tmp_path / 'a.npz'}", "seed": seed, "num-clients": 2}), 2)
        for seed in (0, 1)
    )
    assert torch.equal(first.dataset.test.inputs, second.dataset.test.inputs)
    assert not np.array_equal(first.train[0], second.train[0])


def test_a_default_split_follows_the_data(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((30, 2)), y=np.arange(30) % 2, client=np.arange(30) % 3)
    np.savez(tmp_path / "b.npz", x=np.zeros((30, 2)), y=np.arange(30) % 2)
    natural, iid, digits = (
        Config.make({"dataset": name}) for name in (f"npz:{tmp_path / 'a.npz'}", f"npz:{tmp_path / 'b.npz'}", "digits")
    )
    assert [c.partition for c in (natural, iid, digits)] == ["natural", "iid", "classes"]
    assert count_clients(natural) == 3


def _csv(tmp_path: Path, text: str, **keys: object) -> dict[str, object]:
    return {"dataset": f"csv:{write_csv(tmp_path / 'bad.csv', text)}", "label-column": "target", **keys}


def _npz(tmp_path: Path, **arrays: np.ndarray) -> dict[str, object]:
    np.savez(tmp_path / "bad.npz", **arrays)
    return {"dataset": f"npz:{tmp_path / 'bad.npz'}"}


def _folder(tmp_path: Path, folders: dict[str, int], **keys: object) -> dict[str, object]:
    write_images(tmp_path / "bad", folders)
    return {"dataset": f"folder:{tmp_path / 'bad'}", "model": "lenet", **keys}


def _cut_off(tmp_path: Path) -> dict[str, object]:
    settings = _folder(tmp_path, {"a": 2, "b": 2})
    for name in ("a/0.png", "b/1.png"):
        path = tmp_path / "bad" / name
        path.write_bytes(path.read_bytes()[:40])
    return settings


def _tables(tmp_path: Path, **texts: str) -> dict[str, object]:
    for name, text in texts.items():
        write_csv(tmp_path / f"t/{name}.csv", text)
    return {"dataset": f"csv:{tmp_path / 't'}", "label-column": "target"}


def _of_floats(settings: dict[str, object]) -> dict[str, object]:
    path = Path(str(settings["dataset"]).removeprefix("folder:")) / "a/0.tif"
    path.with_suffix(".png").unlink()
    Image.fromarray(np.full((4, 6), 0.5, np.float32)).save(path)
    return settings


def _masks(tmp_path: Path, values: list[int], mode: str = "L") -> dict[str, object]:
    write_images(tmp_path / "bad", {"images": 3})
    (tmp_path / "bad/masks").mkdir()
    for at, value in enumerate(values):
        Image.fromarray(np.full((4, 6), value, np.uint8)).convert(mode).save(tmp_path / f"bad/masks/{at}.png")
    return {"dataset": f"folder:{tmp_path / 'bad'}", "model": "torchvision-seg:lraspp_mobilenet_v3_large"}


def _twins(settings: dict[str, object]) -> dict[str, object]:
    path = Path(str(settings["dataset"]).removeprefix("folder:")) / "images/1.jpg"
    Image.new("RGB", (6, 4)).save(path)
    return settings


def _resized(settings: dict[str, object]) -> dict[str, object]:
    Image.new("L", (3, 3)).save(Path(str(settings["dataset"]).removeprefix("folder:")) / "masks/2.png")
    return settings


def _parquet(tmp_path: Path, **columns: object) -> dict[str, object]:
    import pandas as pd

    pd.DataFrame(columns).to_parquet(tmp_path / "t.parquet")
    return {"dataset": f"csv:{tmp_path / 't.parquet'}", "label-column": "target"}


def _mixed(tmp_path: Path) -> dict[str, object]:
    return _tables(tmp_path, one="x,target\n1,0\n2,1\n", two="z,target\n1,0\n2,1\n")


def _latin(tmp_path: Path) -> dict[str, object]:
    (tmp_path / "latin.csv").write_bytes("größe,target\n1,0\n2,1\n".encode("latin-1"))
    return {"dataset": f"csv:{tmp_path / 'latin.csv'}", "label-column": "target"}


BAD = {
    "unknown kind": (lambda p: {"dataset": f"fodler:{p}"}, "'fodler'.*'folder'"),
    "relative path": (lambda p: {"dataset": "csv:a.csv"}, "'csv:a.csv'.*'csv:/"),
    "absent path": (lambda p: {"dataset": f"npz:{p / 'nothing.npz'}"}, "nothing.npz'"),
    "no label column": (lambda p: _csv(p, TABLE, **{"label-column": ""}), "label-column is not set: .* age, sex, bmi"),
    "wrong columns, all at once": (
        lambda p: _csv(p, TABLE, **{"client-column": "hospitl", "feature-columns": "age,weight"}),
        "client-column='hospitl' .*'hospital'.*\nfeature-columns='weight' is not",
    ),
    "missing features": (lambda p: _csv(p, TABLE), r"'bmi': 1 of 10 .*line 3\)\n.*missing=mean"),
    "missing targets": (lambda p: _csv(p, "x,target\n1,0\n2,\n"), "1 of the 2 .*'target'"),
    "text with many values": (
        lambda p: _csv(p, "name,target\n" + "".join(f"n{i},{i % 2}\n" for i in range(60))),
        "'name' is text with .*feature-columns",
    ),
    "text among numbers": (
        lambda p: _tables(p, one="x,target\n1,0\n2.5,1\n", two="x,target\n3,0\n4,1\n1.5 mg,1\n"),
        r"'x' has numbers and text \(1.5 mg; first in line 4 of two\).*x:A\|B",
    ),
    "missing values of one table": (
        lambda p: _tables(p, one="x,target\n1,0\n2,1\n", two="x,target\n3,0\n,1\n"),
        r"'x': 1 of 4 values .*line 3 of two\)",
    ),
    "missing targets of one table": (
        lambda p: _tables(p, one="x,target\n1,0\n2,1\n", two="x,target\n3,0\n4,\n"),
        "1 of the 4 values .*'target'.*line 3 of two",
    ),
    "a table without rows": (lambda p: _tables(p, one="x,target\n1,0\n2,1\n", two="x,target\n"), "two.csv has no rows"),
    "an empty table": (lambda p: _tables(p, one="x,target\n1,0\n2,1\n", two=""), "two.csv is empty"),
    "decimal commas": (lambda p: _csv(p, 'dose;target\n"0,5";0\n"1,25";1\n'), r"'dose' .*\(0,5, 1,25\).* dose:A\|B"),
    "thousands and per cent": (
        lambda p: _csv(p, 'a,b,target\n"1,100",30%,0\n"1,250",7%,1\n'),
        r"'a' .*\(1,100, 1,250\).*\n.*'b' .*\(30%, 7%\)",
    ),
    "targets with decimal commas": (lambda p: _csv(p, 'x;target\n1;"0,5"\n2;"0,75"\n'), "'target' .*0,5.*class-names"),
    "classes as floats": (
        lambda p: _npz(p, x=np.zeros((3, 2)), y=np.array([0.0, 1.0, 2.0])),
        r"y .*\(0\.0, 1\.0, 2\.0\).*task=classification .*task=regression",
    ),
    "one-hot classes": (lambda p: _npz(p, x=np.zeros((3, 2)), y=np.eye(3)), "task=classification .*task=multi-label"),
    "labels as classes": (
        lambda p: {**_npz(p, x=np.zeros((3, 2)), y=np.array([[0, 1], [1, 1], [1, 0]])), "task": "classification"},
        "row 1 .* has 2 labels.*task=multi-label",
    ),
    "channels last": (lambda p: _npz(p, x=np.zeros((3, 8, 8, 3)), y=np.arange(3)), r"x\.transpose\(0, 3, 1, 2\)"),
    "another encoding": (_latin, "latin.csv is not UTF-8"),
    "a word of YAML": (lambda p: _csv(p, TABLE, **read_overrides(["positive-values=yes"])), "positive-values: true"),
    "no positive values": (
        lambda p: _csv(p, TABLE, **{"positive-values": "7", "missing": "mean"}),
        r"positive-values='7'.*'target' \(found: 0, 1, 2, 3, 4\)",
    ),
    "task that does not fit": (lambda p: _csv(p, TABLE, task="multi-label", missing="mean"), "task=multi-label"),
    "tables with other columns": (_mixed, "two.csv and one.csv differ in the columns x, z"),
    "a column twice": (lambda p: _csv(p, "x,x ,target\n1,2,0\n2,3,1\n"), "two columns x"),
    "a parquet column twice": (lambda p: _parquet(p, **{"x": [1, 2], "x ": [2, 3], "target": [0, 1]}), "two columns x"),
    "a target twice": (lambda p: _csv(p, "x,target,target\n1,0,0\n2,1,1\n"), "two columns target"),
    "rows longer than the first": (lambda p: _csv(p, "x,target\n0,2,0\n1,3,1\n"), "line 2 of .*bad.csv has 3 values"),
    "dates as numbers": (
        lambda p: _csv(p, "day,target\n" + "".join(f"{20240101 + i},{i % 2}\n" for i in range(40))),
        "'day': its 40 different values are 21 in float32",
    ),
    "NaN in an array": (lambda p: _npz(p, x=np.full((3, 2), np.nan), y=np.arange(3)), "6 .* x .*missing=mean"),
    "an infinite target": (lambda p: _npz(p, x=np.zeros((3, 2)), y=np.array([0.5, np.inf, 1.5])), "1 of the 3 .* y "),
    "images of 32 bits": (lambda p: _of_floats(_folder(p, {"a": 2, "b": 2})), r"1 of 4 .*mode F.*intensity-range"),
    "masks of 0 and 255": (lambda p: _masks(p, [0, 255, 0]), "0 and 255.*0 and 1"),
    "masks in colour": (lambda p: _masks(p, [0, 1, 0], "RGB"), r"mask .*0\.png cannot be read"),
    "masks beyond num-classes": (lambda p: {**_masks(p, [0, 4, 1]), "num-classes": 3}, "num-classes=3.* class 4: 5 "),
    "masks and rand-augment": (lambda p: {**_masks(p, [0, 1, 1]), "augment": "rand-augment"}, "augment: rand-augment"),
    "a part without images": (lambda p: _folder(p, {"train/a": 1, "train/b": 1}), "no test images: .*train"),
    "not a table": (
        lambda p: {"dataset": f"csv:{write_csv(p / 'a.parquet', 'no parquet')}", "label-column": "y"},
        "a.parquet cannot be read",
    ),
    "absent array": (lambda p: _npz(p, x=np.zeros((3, 2)), z=np.zeros(3)), "the array y; it has x, z"),
    "one number": (lambda p: _npz(p, x=np.float32(1), y=np.zeros(4)), r"x has shape \(\)"),
    "no examples": (lambda p: _npz(p, x=np.zeros((0, 2)), y=np.zeros(0)), r"x has shape \(0, 2\)"),
    "unequal lengths": (lambda p: _npz(p, x=np.zeros((3, 2)), y=np.zeros(4)), r"y has shape \(4,\), x has 3"),
    "a client for two axes": (
        lambda p: _npz(p, x=np.zeros((3, 2)), y=np.arange(3), client=np.zeros((3, 1))),
        r"client has shape \(3, 1\); \(3,\)",
    ),
    "five channels": (lambda p: _npz(p, x=np.zeros((3, 4, 4, 5), np.uint8), y=np.arange(3)), r"x .*\(3, 4, 4, 5\)"),
    "infinite numbers": (lambda p: _npz(p, x=np.full((3, 2), np.inf), y=np.arange(3)), "6 numbers of x"),
    "no npz file": (lambda p: {"dataset": f"npz:{write_csv(p / 'a.npz', 'text')}"}, "a.npz' cannot be read"),
    "one array": (
        lambda p: (np.save(p / "x.npy", np.zeros(3)), {"dataset": f"npz:{p / 'x.npy'}"})[1],
        "x.npy' cannot be read",
    ),
    "complex targets": (lambda p: _npz(p, x=np.zeros((3, 2)), y=np.zeros(3, complex)), "y is complex128"),
    "times as numbers": (
        lambda p: _npz(p, x=np.stack([1.7e9 + np.arange(60), np.arange(60)], 1), y=np.arange(60) % 2),
        "column 0 of x: its 60 different values are 1 in float32",
    ),
    "a class name twice": (
        lambda p: {**_npz(p, x=np.zeros((3, 2)), y=np.arange(3)), "class-names": "0,1,2,2"},
        "class-names has 2 twice",
    ),
    "lists in a column": (lambda p: _parquet(p, x=[[1, 2], [3, 4]], target=[0, 1]), "'x' .* lists"),
    "dates in a column": (
        lambda p: _parquet(p, x=np.array(["2024-01-01", "2024-01-02"], "datetime64[ns]"), target=[0, 1]),
        "'x' .* dates",
    ),
    "one mask of two images": (lambda p: _twins(_masks(p, [0, 1, 1])), r"1\.jpg and 1\.png have one mask"),
    "a mask of another size": (lambda p: _resized(_masks(p, [0, 1, 1])), r"mask .*2\.png .* 3 x 3 .* 6 x 4"),
    "unknown split": (
        lambda p: _npz(p, x=np.zeros((3, 2)), y=np.arange(3) % 2, split=np.array(["train", "test", "later"])),
        "split has later",
    ),
    "one class": (lambda p: _folder(p, {"a": 3}), r"one class folder only \(a\)"),
    "images without a class": (lambda p: _folder(p, {".": 2}), "in the folder itself"),
    "layouts mixed": (lambda p: _folder(p, {"x/a": 1, "x/b": 1, "b": 1}), "x/a has a client folder, b has none"),
    "a validation folder": (
        lambda p: _folder(p, {"train/a": 1, "val/a": 1, "train/b": 1}),
        "val/a lies in .*validation-share",
    ),
    "parts below the classes": (
        lambda p: _folder(p, {"cat/train": 1, "cat/test": 1, "dog/train": 1, "dog/test": 1}),
        "test, train.*train/class/file",
    ),
    "parts without classes": (lambda p: _folder(p, {"Train": 1, "val": 1, "other": 1}), "Train, val.*train/class/file"),
    "too deep": (lambda p: _folder(p, {"x/y/a": 1, "x/y/b": 1}), "x/y/a is 3 folders deep"),
    "damaged files": (_cut_off, "2 of 4 .*\n.*a/0.png.*\n.*b/1.png.*\n.*skip-unreadable=true"),
    "patients on both sides": (
        lambda p: {
            **_npz(p, x=np.zeros((4, 2)), y=np.arange(4) % 2, group=np.zeros(4), split=np.array([0, 0, 1, 1])),
            "num-clients": 1,
        },
        "1 values of the group column",
    ),
    "a key of tables": (lambda p: _folder(p, {"a": 2, "b": 2}, **{"label-column": "y"}), "label-column='y'"),
    "a model for images": (
        lambda p: _csv(p, TABLE, missing="mean", model="lenet", **{"num-clients": 2}),
        "'lenet' takes images.* 7 features",
    ),
    "a split by class of a regression": (
        lambda p: {**_npz(p, x=np.zeros((9, 2)), y=np.arange(9) / 2), "partition": "shards", "num-clients": 2},
        "'shards' splits by class; the examples",
    ),
    "nodes' data undescribed": (lambda p: {"dataset": "csv:"}, "feature-columns is not set, task is not set"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_before_any_work(tmp_path: Path, case: str) -> None:
    settings, message = BAD[case]
    with pytest.raises((ConfigError, DataError), match=f"(?s){message}"):
        start(settings(tmp_path))


def start(settings: dict[str, object]) -> None:
    from fedbn_flwr.lab.runs.start_checks import check

    config = Config.make(settings)
    check(config)
    partitioned_data(config, count_clients(config))


def test_ambiguous_targets_are_what_the_task_says(tmp_path: Path) -> None:
    arrays = {"one-hot": np.eye(3)[[2, 0, 1, 2]], "floats": np.array([2.0, 0.0, 1.0, 2.0])}
    for name, y in arrays.items():
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((4, 2)), y=y, split=[0, 0, 0, 1])
    cases = [("one-hot", "classification", 3), ("one-hot", "multi-label", 3), ("floats", "classification", 3)]
    for name, task, outputs in [*cases, ("floats", "regression", 1)]:
        info = own_info(own("npz", tmp_path / f"{name}.npz", task=task))
        assert (info.task.name, info.num_classes) == (task, outputs)
        targets = load_dataset(info).train.targets
        expected = [2, 0, 1] if task in ("classification", "regression") else np.eye(3)[[2, 0, 1]].tolist()
        assert targets.tolist() == expected


def test_text_that_is_plain_numbers_is_classes_and_categories(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=np.zeros((4, 2)), y=np.array(["0", "1", "1", "0"]))
    assert own_info(own("npz", tmp_path / "t.npz")).class_names == ("0", "1")


def test_classes_with_gaps_are_warned_of(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=np.zeros((4, 2)), y=np.array([0, 200, 0, 200]))
    (warning,) = own_info(own("npz", tmp_path / "t.npz")).warnings
    assert warning == (
        "2 classes, and the largest is 200: a model has 201 outputs. Save the classes as 0 to 1, or set "
        "num-classes=201 if the others are to come"
    )
    for keys, outputs in (({"num_classes": 201}, 201), ({"class_names": "0,200"}, 2)):
        info = own_info(own("npz", tmp_path / "t.npz", **keys))
        assert (info.num_classes, info.warnings) == (outputs, ())
    np.savez(tmp_path / "few.npz", x=np.zeros((4, 2)), y=np.array([0, 4, 9, 9]))
    assert (own_info(own("npz", tmp_path / "few.npz"))).warnings == ()
    np.savez(tmp_path / "p.npz", x=np.zeros((4, 2, 2), np.uint8), y=np.full((4, 2, 2), 128))
    _masks(tmp_path, [0, 128, 255])
    for kind, name, said in (("npz", "p.npz", "1 class, and"), ("folder", "bad", "values 0, 128: 2 classes, and")):
        with pytest.raises(DataError, match=f"{said} the largest is 128: a model has 129 outputs"):
            own_info(own(kind, tmp_path / name))
        assert own_info(own(kind, tmp_path / name, num_classes=129)).num_classes == 129


BLURS = ("bilinear", "bicubic", "lanczos", "enlarged", "jpeg 95", "jpeg 75", "jpeg 30")


def _blurred(mask: Image.Image, how: str) -> np.ndarray:
    if how.startswith("jpeg"):
        file = io.BytesIO()
        mask.save(file, "JPEG", quality=int(how[5:]))
        return np.array(Image.open(file))
    if how == "enlarged":
        return np.array(mask.resize((20, 20), Image.Resampling.NEAREST).resize((64, 64), Image.Resampling.BILINEAR))
    return np.array(mask.resize((64, 64), Image.Resampling[how.upper()]))


@pytest.mark.parametrize("how", ["nearest", *BLURS])
@pytest.mark.parametrize("classes", [[255], [128], [60, 120, 240], [1, 2], [*range(1, 15)]])
def test_masks_that_were_resized_or_compressed_with_loss_are_refused(tmp_path: Path, how: str, classes: list) -> None:
    draw, masks = np.random.default_rng(0), []
    for _ in range(8):
        mask = Image.new("L", (150, 150))
        for value in classes:
            x, y, r = draw.integers(10, 90, 3).tolist()
            ImageDraw.Draw(mask).ellipse((x, y, x + r, y + r * 7 // 10), fill=value)
        masks.append(_blurred(mask, how))
    y = np.stack(masks)
    np.savez(tmp_path / "t.npz", x=np.zeros_like(y), y=y)
    keys = {"num_classes": 256} if how == "nearest" and max(classes) > 20 else {}
    request = own("npz", tmp_path / "t.npz", **keys)
    if how == "nearest" or (max(classes) < 20 and how != "jpeg 30"):  # between classes in a row is a class
        assert own_info(request).warnings == ()
        return
    if classes == [1, 2]:
        return  # JPEG rounds them away
    with pytest.raises(DataError, match=r"resized or compressed with loss.* Resize masks with nearest"):
        own_info(request)
    (warning,) = own_info(own("npz", tmp_path / "t.npz", num_classes=256)).warnings
    assert "resized or compressed with loss" in warning


def test_masks_have_the_name_of_their_image_or_one_like_it(tmp_path: Path) -> None:
    write_images(tmp_path, {"images": 3})
    (tmp_path / "masks").mkdir()
    for name in ("0.png", "1_mask.png", "2-mask.tif"):
        Image.fromarray(np.eye(4, 6, dtype=np.uint8)).save(tmp_path / "masks" / name)
    assert own_info(own("folder", tmp_path)).num_classes == 2
    (tmp_path / "masks/2-mask.tif").unlink()
    with pytest.raises(DataError, match=r"2\.png has no mask .*2\.png, nor 2_mask\.png"):
        own_info(own("folder", tmp_path))
    Image.fromarray(np.eye(4, 6, dtype=np.uint8)).save(tmp_path / "masks/2.jpg")
    with pytest.raises(DataError, match=r"mask .*2\.jpg is compressed with loss"):
        own_info(own("folder", tmp_path))


def test_text_of_arrays_is_that_of_tables(tmp_path: Path) -> None:
    """Without spaces around it, and bytes are text."""
    for y in (np.array(["cat", " cat", "dog"]), np.array([b"cat", b"cat ", b"dog"])):
        np.savez(tmp_path / "t.npz", x=np.zeros((3, 2)), y=y, client=y)
        info = own_info(own("npz", tmp_path / "t.npz"))
        assert (info.class_names, info.client_names) == (("cat", "dog"), ("cat", "dog"))


def test_decimal_numbers_of_parquet_are_numbers(tmp_path: Path) -> None:
    import pandas as pd

    columns = {"x": [Decimal("1.5"), None, Decimal("3")], "y": [Decimal("0.5"), Decimal("1"), Decimal("2.5")]}
    pd.DataFrame(columns).to_parquet(tmp_path / "t.parquet")
    info = own_info(own("csv", tmp_path / "t.parquet", label_column="y", missing="mean"))
    assert (info.feature_names, info.task.name) == (("x",), "regression")


def test_positive_values_that_are_not_there_are_a_note(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=np.zeros((3, 2)), y=np.array(["benign", "malignant", "unknown"]))
    (note,) = own_info(own("npz", tmp_path / "t.npz", positive_values="malingent,malignant")).notes
    assert note == "positive-values: malingent not found in y (found: benign, malignant, unknown)"


def test_one_hot_classes_have_the_names_of_the_config(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=np.zeros((3, 2)), y=np.eye(3))
    info = own_info(own("npz", tmp_path / "t.npz", task="classification", class_names="a,b,c", num_classes=3))
    assert (info.class_names, info.num_classes) == (("a", "b", "c"), 3)
    for keys, said in (
        ({"class_names": "a,b"}, "class-names has 2 names; y have 3"),
        ({"num_classes": 2}, "fewer than the 3"),
    ):
        with pytest.raises(ConfigError, match=said):
            own_info(own("npz", tmp_path / "t.npz", task="classification", **keys))
    np.savez(tmp_path / "t.npz", x=np.zeros((4, 2)), y=np.array([[0], [2], [1], [0]]))
    assert own_info(own("npz", tmp_path / "t.npz", positive_values=">0")).task.name == "binary"


def test_files_of_other_types_are_named(tmp_path: Path) -> None:
    _tables(tmp_path, one="x,target\n1,0\n2,1\n", two="x,target\n3,0\n4,1\n")
    (tmp_path / "t/three.xlsx").write_bytes(b"x")
    request = own("csv", tmp_path / "t", label_column="target")
    (tmp_path / "t/folder").mkdir()
    assert own_info(request).notes[0].startswith("left out: 1 file of another type in dataset='csv:")
    assert own_info(request).notes[0].endswith("(three.xlsx)")
    write_images(tmp_path / "i", {"a": 2, "b": 2})
    (tmp_path / "i/c").mkdir()
    (tmp_path / "i/c/0.gif").write_bytes(b"x")
    assert own_info(own("folder", tmp_path / "i")).notes[0].endswith("(c/0.gif)")


def test_a_table_that_changes_in_its_folder_is_read_again(tmp_path: Path) -> None:
    for value in (1, 1000):
        _tables(tmp_path, one=f"x,target\n{value},0\n2,1\n", two="x,target\n3,0\n4,1\n")
        data = load_dataset(own_info(own("csv", tmp_path / "t", label_column="target", test_share=0.25)))
        assert value in torch.cat([data.train.inputs, data.test.inputs])


def test_unreadable_files_can_be_left_out(tmp_path: Path) -> None:
    settings = {**_cut_off(tmp_path), "skip-unreadable": True, "num-clients": 1, "test-share": 0.5}
    config = Config.make(settings)
    data = partitioned_data(config, 1).dataset
    assert len(data.train) + len(data.test) == 2
    (note,) = config.data_info().notes
    assert "2 of 4 image files are left out" in note
    assert "a/0.png" in note


def test_the_positive_class_of_two_texts_is_told_and_class_names_swap_it(tmp_path: Path) -> None:
    """F1, AUPRC and probabilities are those of class 1."""
    text = np.array(["diseased", "healthy"] * 5)
    np.savez(tmp_path / "t.npz", x=np.arange(10.0)[:, None], y=text)
    write_images(tmp_path / "i", {"diseased": 2, "healthy": 2})
    for kind, path in (("npz", tmp_path / "t.npz"), ("folder", tmp_path / "i")):
        info = own_info(own(kind, path, task="binary"))
        assert info.notes == ("positive (1) is 'healthy'; class-names=healthy,diseased makes it 'diseased'",)
        assert own_info(own(kind, path)).notes == ()
        swapped = own(kind, path, task="binary", class_names="healthy,diseased")
        assert (own_info(swapped).notes, own_info(swapped).class_names) == ((), ("healthy", "diseased"))
    data = load_dataset(own_info(own("npz", tmp_path / "t.npz", task="binary", class_names="healthy,diseased")))
    rows = torch.cat([data.train.inputs, data.test.inputs]).flatten().int().tolist()
    assert torch.cat([data.train.targets, data.test.targets]).tolist() == [int(text[at] == "diseased") for at in rows]


def test_what_is_not_used_of_image_files_is_a_note(tmp_path: Path) -> None:
    write_images(tmp_path, {"a": 2, "b": 2})
    Image.new("RGBA", (4, 6)).save(tmp_path / "b/1.png")
    assert own_info(own("folder", tmp_path)).notes == ("alpha channels of 1 of 4 image files are not used (b/1.png)",)


def test_folders_without_a_usable_image_are_named(tmp_path: Path) -> None:
    write_images(tmp_path, {"apple": 2, "berry": 1, "cherry": 2})
    (tmp_path / "berry/0.png").write_bytes(b"no image")
    (tmp_path / "date").mkdir()
    info = own_info(own("folder", tmp_path, skip_unreadable=True))
    assert info.class_names == ("apple", "cherry")
    assert "no usable image in berry, date: a class without another folder is left out" in info.notes


def test_images_on_the_disk_give_the_bits_of_those_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "data", {"a/cat": 6, "a/dog": 5, "b/cat": 4, "b/dog": 6}, size=(40, 40))
    keys = {"dataset": f"folder:{tmp_path / 'data'}", "model": "lenet", "local-steps": 3, "batch-size": 4}
    config = Config.make({**keys, "augment": "flip", "num-server-rounds": 2})
    kept = run(config, tmp_path / "kept", workers=0)["sha256"]
    monkeypatch.setattr("fedbn_flwr.lab.data.image_files.MAX_BYTES", 0)
    loading._load.cache_clear()
    left = run(config, tmp_path / "left", workers=0)["sha256"]
    loading._load.cache_clear()
    assert left == kept


def test_the_split_of_a_table_by_split_column(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", "x,y,part\n1,0,train\n2,1,test\n3,1,train\n")
    data = load_dataset(own_info(own("csv", path, label_column="y", split_column="part")))
    assert data.train.inputs.tolist() == [[1.0], [3.0]]
    assert data.test.inputs.tolist() == [[2.0]]


def test_a_data_set_of_the_hub_by_a_local_stand_in(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"]), "site": datasets.Value("string")}
    )
    for part, count in (("train", 8), ("test", 4)):
        rows = [
            {"image": Image.fromarray(np.full((6, 6), at, np.uint8)), "label": at % 2, "site": "ab"[at % 2]}
            for at in range(count)
        ]
        (tmp_path / "set").mkdir(exist_ok=True)
        datasets.Dataset.from_list(rows, features=features).to_parquet(str(tmp_path / f"set/{part}.parquet"))
    info = own_info(OwnData("hf", str(tmp_path / "set"), client_column="site"))
    data = load_dataset(info)
    assert (info.class_names, data.group_names, info.channels) == (("no", "yes"), ("a", "b"), 1)
    assert data.train.inputs[:, 0, 0, 0].tolist() == list(range(8))
    assert data.test.targets.tolist() == [0, 1, 0, 1]
    three = datasets.ClassLabel(names=["none", "benign", "malignant"])
    some = datasets.Dataset.from_dict({"x": [1.0, 2.0, 3.0], "label": [1, 2, 1]})
    (tmp_path / "three").mkdir()
    some.cast_column("label", three).to_parquet(str(tmp_path / "three/train.parquet"))
    for names, targets in (("", [1, 2, 1]), ("malignant,benign", [1, 0, 1])):
        info = own_info(OwnData("hf", str(tmp_path / "three"), class_names=names))
        assert info.class_names == tuple(names.split(",") if names else three.names)
        data = load_dataset(info)
        assert sorted([*data.train.targets.tolist(), *data.test.targets.tolist()]) == sorted(targets)
    gaps = datasets.Dataset.from_dict({"x": [1.0, 2.0, 3.0], "label": [1, 0, 1], "site": ["a", None, "b"]})
    (tmp_path / "gaps").mkdir()
    gaps.to_parquet(str(tmp_path / "gaps/train.parquet"))
    for key in ("client_column", "group_column"):
        with pytest.raises(DataError, match=r"1 values of column 'site' are missing"):
            own_info(OwnData("hf", str(tmp_path / "gaps"), **{key: "site"}))
    deep = [Image.fromarray(np.full((6, 6), 63000, np.uint16)) for _ in range(2)]
    (tmp_path / "deep").mkdir()
    rows = datasets.Dataset.from_dict(
        {"image": deep, "label": [0, 1]},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")}),
    )
    rows.to_parquet(str(tmp_path / "deep/train.parquet"))
    images = load_dataset(own_info(OwnData("hf", str(tmp_path / "deep"), test_share=0.5))).train.inputs
    assert images.unique().tolist() == [round(63000 / 65535 * 255)]
    with pytest.raises(ConfigError, match=r"client-column='place' is not a column .*site"):
        own_info(OwnData("hf", str(tmp_path / "set"), client_column="place"))
    with pytest.raises(DataError, match=r"hf:.*absent' cannot be read: "):
        own_info(OwnData("hf", str(tmp_path / "absent")))
