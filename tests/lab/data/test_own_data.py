"""Own data: layouts, clients, units, splits and targets.

Bad input is refused before any work.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from PIL import Image

from fedbn_flwr.client.kept import state_dir
from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.config import Config, data_of, listed
from fedbn_flwr.lab.config.fields import Fields
from fedbn_flwr.lab.data import OwnData, load_dataset, own_info
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data


def write_images(
    root: Path, folders: dict[str, int], size: tuple[int, int] = (6, 4)
) -> None:
    for number, (folder, count) in enumerate(folders.items()):
        (root / folder).mkdir(parents=True)
        for at in range(count):
            pixels = (
                np.random.default_rng(100 * number + at)
                .integers(0, 256, (*size[::-1], 3))
                .astype(np.uint8)
            )
            Image.fromarray(pixels).save(root / folder / f"{at}.png")


def own(kind: str, path: Path, **keys: object) -> OwnData:
    return OwnData(kind, str(path), **keys)


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


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    write_images(tmp_path, {"bus": 3, "train": 3})
    assert own_info(own("folder", tmp_path)).class_names == ("bus", "train")


def test_two_classes_with_one_spelling_have_both_folders_at_a_site(
    tmp_path: Path,
) -> None:
    write_images(tmp_path, {"a/x": 2, "a/X": 0, "b/X": 2})
    assert own_info(own("folder", tmp_path)).class_names == ("X", "x")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_image_folders(tmp_path: Path, layout: str) -> None:
    """Empty folders of an archive are not classes in other layouts."""
    folders, clients, tests = LAYOUTS[layout]
    write_images(tmp_path, folders)
    for depth in {1, 2, 3, 4} - {len(layout.split("/"))}:
        tmp_path.joinpath(*[f"__MACOSX{depth}"] * depth).mkdir(parents=True)
    info = own_info(own("folder", tmp_path))
    data = load_dataset(info, size=4)
    assert (info.num_classes, info.class_names, info.size, info.channels) == (
        2,
        ("cat", "dog"),
        4,
        3,
    )
    assert data.group_names == clients
    total = sum(folders.values())
    assert len(data.train) + len(data.test) == total
    assert len(data.test) == (round(0.2 * total) if tests is None else tests)
    labels = torch.cat([data.train.labels, data.test.labels])
    for label, name in enumerate(("cat", "dog")):
        assert (labels == label).sum() == sum(
            count for folder, count in folders.items() if folder.endswith(name)
        )
    for samples in (data.train, data.test):
        if clients:
            b = samples.groups == clients.index("b")
            assert (samples.labels[b] == 1).all()  # client b has only dogs


def test_arrays_of_every_form(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    count = 20
    images = rng.integers(0, 256, (count, 5, 5)).astype(np.uint8)
    cases = {
        "classes": (images, np.arange(count) % 3, "classification", 3),
        "rows": (rng.normal(size=(count, 4)), rng.normal(size=count), "regression", 1),
        "labels": (
            rng.normal(size=(count, 4)),
            rng.integers(0, 2, (count, 3)),
            "multi-label",
            3,
        ),
        "signals": (
            rng.normal(size=(count, 2, 9)),
            rng.normal(size=(count, 2)),
            "regression",
            2,
        ),
        "pixels": (images, np.where(images > 200, 255, images % 4), "segmentation", 4),
    }
    for name, (x, y, task, outputs) in cases.items():
        np.savez(
            tmp_path / f"{name}.npz",
            x=x,
            y=y,
            client=np.arange(count) % 2,
            split=np.arange(count) >= 15,
        )
        info = own_info(own("npz", tmp_path / f"{name}.npz"))
        data = load_dataset(info)
        assert (info.task.name, info.num_classes) == (task, outputs), name
        assert (len(data.train), len(data.test)) == (15, 5)
        assert data.train.groups.tolist() == [at % 2 for at in range(15)]
        expected = torch.from_numpy(
            x[:15].astype(np.uint8 if x.dtype == np.uint8 else np.float32)
        )
        assert torch.equal(data.train.inputs.flatten(1), expected.flatten(1)), name


def test_arrays_that_are_not_used_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = np.random.default_rng(0).normal(size=(20, 4)), np.arange(20) % 2
    np.savez(tmp_path / "used.npz", x=x, y=y, client=y)
    np.savez(tmp_path / "more.npz", x=x, y=y, site=y, x_test=x)
    own_info(own("npz", tmp_path / "used.npz"))
    assert not caplog.messages
    own_info(own("npz", tmp_path / "more.npz"))
    (told,) = caplog.messages
    assert "site, x_test" in told


def test_a_natural_client_has_all_its_test_examples(tmp_path: Path) -> None:
    """Test examples may have classes that the client does not train on.

    The test over all clients excludes a held-out client.
    """
    client, split = (
        np.array(list("aaaaaabbb")),
        np.array(["train"] * 4 + ["test", "test", "train", "train", "test"]),
    )
    y = np.array([0, 0, 0, 0, 0, 1, 0, 1, 1])
    keys = _npz(
        tmp_path, x=np.arange(18.0).reshape(9, 2), y=y, client=client, split=split
    )
    assert [len(part) for part in partitioned_data(Config.make(keys), 2).test] == [2, 1]
    held = partitioned_data(Config.make({**keys, "held-out-clients": "a"}), 1)
    assert len(held.test_view()) == 1


@pytest.mark.parametrize(
    "names", [["01", "001", "1.1", "1.10"], ["0E8", "0E3", "1e2", "100"]]
)
def test_sites_that_are_one_number_stay_four_sites(
    tmp_path: Path, names: list[str]
) -> None:
    """The sites are names in an array or folders."""
    keys = _npz(
        tmp_path,
        x=np.arange(80.0).reshape(40, 2),
        y=np.arange(40) % 2,
        client=np.array(names * 10),
    )
    assert data_of(Config.make(keys)).info.client_names == tuple(sorted(names))
    write_images(
        tmp_path / "i",
        {f"{name}/{label}": 2 for name in names for label in ("cat", "dog")},
    )
    assert own_info(own("folder", tmp_path / "i")).client_names == tuple(sorted(names))


def test_units_stay_together_in_every_split(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    units = rng.integers(0, 30, 200)
    np.savez(tmp_path / "a.npz", x=rng.normal(size=(200, 3)), y=units % 3, group=units)
    settings = {
        "dataset": f"npz:{tmp_path / 'a.npz'}",
        "validation-share": 0.2,
        "num-clients": 4,
    }
    for partition in ("iid", "dirichlet-equal", "shards"):
        split = partitioned_data(Config.make({**settings, "partition": partition}), 4)
        train_units = split.dataset.train.units.numpy()
        parts = [*split.train, *split.validation]
        homes = [set(train_units[part].tolist()) for part in parts] + [
            set(split.dataset.test.units.tolist())
        ]
        assert sum(map(len, homes)) == len(set().union(*homes)), partition
        assert sum(len(part) for part in parts) == len(train_units)


def test_own_test_examples_do_not_depend_on_the_seed(tmp_path: Path) -> None:
    keys = _npz(tmp_path, x=np.arange(60.0).reshape(30, 2), y=np.arange(30) % 2)
    first, second = (
        partitioned_data(Config.make({**keys, "seed": seed, "num-clients": 2}), 2)
        for seed in (0, 1)
    )
    assert torch.equal(first.dataset.test.inputs, second.dataset.test.inputs)
    assert not np.array_equal(first.train[0], second.train[0])


def test_a_default_split_follows_the_data(tmp_path: Path) -> None:
    x, y = np.zeros((30, 2)), np.arange(30) % 2
    iid = Config.make(_npz(tmp_path, x=x, y=y))
    assert (iid.partition, Config.make({}).partition) == ("iid", "classes")
    natural = Config.make(_npz(tmp_path, x=x, y=y, client=np.arange(30) % 3))
    assert natural.partition == "natural"
    assert count_clients(natural) == 3


def _npz(tmp_path: Path, **arrays: np.ndarray) -> dict[str, object]:
    np.savez(tmp_path / "bad.npz", **arrays)
    return {"dataset": f"npz:{tmp_path / 'bad.npz'}"}


def _folder(
    tmp_path: Path, folders: dict[str, int], **keys: object
) -> dict[str, object]:
    write_images(tmp_path / "bad", folders)
    return {"dataset": f"folder:{tmp_path / 'bad'}", "model": "lenet", **keys}


def _cut_off(tmp_path: Path) -> dict[str, object]:
    settings = _folder(tmp_path, {"a": 2, "b": 2})
    for name in ("a/1.png", "b/1.png"):
        path = tmp_path / "bad" / name
        path.write_bytes(path.read_bytes()[:40])
    return settings


def _deep(tmp_path: Path, depth: type, value: float) -> dict[str, object]:
    settings = _folder(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "bad/a/0.png").unlink()
    Image.fromarray(np.full((4, 6), value, depth)).save(tmp_path / "bad/a/0.tif")
    return settings


ARRAYS = {
    "channels last": (
        np.zeros((3, 8, 8, 3)),
        np.arange(3),
        r"x\.transpose\(0, 3, 1, 2\)",
    ),
    "one number": (np.float32(1), np.zeros(4), r"x has shape \(\)"),
    "no examples": (
        np.zeros((0, 2)),
        np.zeros(0),
        r"x has shape \(0, 2\), so it has no example",
    ),
    "a class below 0": (
        np.zeros((4, 2)),
        np.array([0, -1, 1, -1]),
        "y has the class -1 in 2 rows",
    ),
    "complex inputs": (
        np.full((3, 2), 1j),
        np.arange(3),
        "x has complex numbers .*two channels.*magnitude",
    ),
    "unequal lengths": (
        np.zeros((3, 2)),
        np.zeros(4),
        r"y has shape \(4,\), but x has",
    ),
    "five channels": (
        np.zeros((3, 4, 4, 5), np.uint8),
        np.arange(3),
        r"x .*\(3, 4, 4, 5\)",
    ),
    "complex targets": (np.zeros((3, 2)), np.zeros(3, complex), "y is complex128"),
    "one-hot classes": (np.zeros((3, 2)), np.eye(3), "y.argmax.*task=multi-label"),
    "classes that are texts": (
        np.zeros((2, 2)),
        np.array(["a", "b"]),
        "y is <U1 of shape",
    ),
    "classes with gaps": (
        np.zeros((4, 2)),
        np.array([0, 9, 0, 9]),
        "0 to 1.*num-classes=10",
    ),
    "classes from 1": (
        np.zeros((4, 2)),
        np.array([1, 2, 1, 2]),
        "0 to 1.*num-classes=3",
    ),
    "NaN in an array": (
        np.full((3, 2), np.nan),
        np.arange(3),
        "6 numbers of x are NaN",
    ),
    "infinite numbers": (np.full((3, 2), np.inf), np.arange(3), "6 numbers of x"),
    "an infinite target": (
        np.zeros((3, 2)),
        np.array([0.5, np.inf, 1.5]),
        "y is float64",
    ),
    "pixels of 0 and 255": (
        np.zeros((3, 4, 4), np.uint8),
        np.full((3, 4, 4), [0, 255, 0, 255]),
        "255 means an ignored pixel",
    ),
}
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
    "absent path": (lambda p: {"dataset": f"npz:{p / 'nothing.npz'}"}, "nothing.npz'"),
    "absent array": (
        lambda p: _npz(p, x=np.zeros((3, 2)), z=np.zeros(3)),
        "no array y. It has x, z",
    ),
    "a client for two axes": (
        lambda p: _npz(p, x=np.zeros((3, 2)), y=np.arange(3), client=np.zeros((3, 1))),
        r"client is float64 of shape \(3, 1\)",
    ),
    "one array": (
        lambda p: (
            np.save(p / "x.npy", np.zeros(3)),
            {"dataset": f"npz:{p / 'x.npy'}"},
        )[1],
        "x.npy': it cannot be read",
    ),
    "unknown split": (
        lambda p: _npz(
            p,
            x=np.zeros((3, 2)),
            y=np.arange(3) % 2,
            split=np.array(["train", "test", "later"]),
        ),
        "split has later",
    ),
    "patients on both sides": (
        lambda p: {
            **_npz(
                p,
                x=np.zeros((4, 2)),
                y=np.arange(4) % 2,
                group=np.zeros(4, int),
                split=np.array([0, 0, 1, 1]),
            ),
            "num-clients": 1,
        },
        "1 of the values of group are on both",
    ),
    "a split by class of a regression": (
        lambda p: {
            **_npz(p, x=np.zeros((9, 2)), y=np.arange(9) / 2),
            "partition": "shards",
            "num-clients": 2,
        },
        "'shards' splits by class, but the examples",
    ),
    "relative path": (lambda p: {"dataset": "npz:a.npz"}, "'npz:a.npz'.*'npz:/"),
    "no npz file": (
        lambda p: ((p / "a.npz").write_text("x"), {"dataset": f"npz:{p / 'a.npz'}"})[1],
        "npz file",
    ),
    "task that does not fit": (
        lambda p: {
            **_npz(p, x=np.zeros((3, 2)), y=np.arange(3)),
            "task": "multi-label",
        },
        "task=multi-label",
    ),
    "a class too many": (
        lambda p: {**_npz(p, x=np.zeros((4, 2)), y=np.arange(4)), "num-classes": 3},
        "classes 0 to 3 instead of 0 to 2.*num-classes=3 is too small",
    ),
    # The number of classes has no effect with this task.
    "a class too many for two": (
        lambda p: {
            **_npz(p, x=np.zeros((3, 2)), y=np.arange(3)),
            "task": "binary",
            "num-classes": 3,
        },
        "classes 0 to 2 instead of 0 to 1.*task=binary has only .*task=classification",
    ),
    "a folder too many for two": (
        lambda p: _folder(p, {"a": 2, "b": 2, "c": 2}, task="binary"),
        "task=binary needs 2 classes.*a, b, c.*task=classification",
    ),
    "damaged files": (_cut_off, "2 image files .*\n.*a/1.png.*\n.*b/1.png"),
    "images of 16 bits": (
        lambda p: _deep(p, np.uint16, 40_000),
        "a/0.tif .*8 bits.*module:function",
    ),
    "images of 32 bits": (
        lambda p: _deep(p, np.float32, 0.5),
        "a/0.tif .*mode F.*module:function",
    ),
    "a class without a folder": (
        lambda p: _folder(p, {"x/a": 2, "x/b": 2}, **{"num-classes": 3}),
        "num-classes is 3.*a, b.*may be empty",
    ),
    "nodes' data undescribed": (lambda p: {"dataset": "folder:"}, "image-size, task"),
}


@pytest.mark.parametrize(
    ("sizes", "keys", "height", "told"),
    [
        ([(12, 12), *[(96, 96)] * 5], {}, 96, ["12x12", "96x96", "28x28"]),
        (
            [(40, 30), (50, 60), (300, 200), (70, 90), (99, 80)],
            {},
            80,
            ["40x30", "300x200", "28x28"],
        ),
        ([(96, 96)] * 5, {}, 96, []),
        ([(12, 12), *[(96, 96)] * 5], {"image_size": 28}, 96, []),
    ],
    ids=["a thumbnail first", "all sizes", "one size", "asked"],
)
def test_images_of_several_sizes_are_told_with_what_was_taken(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    sizes: list[tuple[int, int]],
    keys: dict[str, int],
    height: int,
    told: list[str],
) -> None:
    """The first file does not decide the size.

    A process gives one warning.
    """
    for number, size in enumerate(sizes):
        write_images(tmp_path / f"{number}", {"cat": 1, "dog": 1}, size)
    info = own_info(own("folder", tmp_path, **keys))
    assert info.size == height
    for _ in range(2):
        load_dataset(info, channels=1, size=28)
    found = [text for text in caplog.messages if "sizes" in text]
    assert len(found) == bool(told)
    for text in found:
        assert [size for size in told if size not in text] == []


@pytest.mark.parametrize("case", [*ARRAYS, *FOLDERS, *BAD])
def test_bad_input_is_named_before_any_work(tmp_path: Path, case: str) -> None:
    if case in ARRAYS:
        x, y, message = ARRAYS[case]
        settings = _npz(tmp_path, x=x, y=y)
    elif case in FOLDERS:
        folders, message = FOLDERS[case]
        settings = _folder(tmp_path, folders)
    else:
        make, message = BAD[case]
        settings = make(tmp_path)
    with pytest.raises((ConfigError, DataError), match=f"(?s){message}"):
        start(settings)


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint16, np.int64, np.uint64])
def test_a_column_of_whole_numbers_is_classes(tmp_path: Path, dtype: type) -> None:
    y = (np.arange(6) % 2).astype(dtype)
    tasks = []
    for name, targets in (("row", y), ("column", y[:, None])):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((6, 2)), y=targets)
        info = own_info(own("npz", tmp_path / f"{name}.npz"))
        tasks.append((info.task.name, info.num_classes))
    assert tasks == [("classification", 2)] * 2


def test_odd_files_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    """A film is left out, and transparency is ignored in each mode that has it."""
    write_images(tmp_path, {"cat": 3, "dog": 3})
    Image.new("RGB", (6, 4)).save(tmp_path / "cat/film.gif")
    palette = Image.new("RGB", (6, 4), "red").quantize(2)
    palette.save(tmp_path / "dog/palette.png", transparency=b"\0\1")
    info = own_info(own("folder", tmp_path))
    load_dataset(info, channels=3, size=4)
    assert "cat/film.gif" in caplog.text
    assert "dog/palette.png" in caplog.text
    assert not [each for each in recwarn if "alette" in str(each.message)]


def start(settings: dict[str, object]) -> None:
    from fedbn_flwr.lab.runs.check_start import checked_config

    config = Config.make(settings)
    checked_config(config)
    partitioned_data(config, count_clients(config))


def test_ambiguous_targets_are_what_the_task_says(tmp_path: Path) -> None:
    arrays = {
        "one-hot": np.eye(3)[[2, 0, 1, 2]],
        "floats": np.array([2.0, 0.0, 1.0, 2.0]),
    }
    for name, y in arrays.items():
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((4, 2)), y=y, split=[0, 0, 0, 1])
    cases = [
        ("one-hot", "multi-label", 3),
        ("floats", "classification", 3),
        ("floats", "regression", 1),
    ]
    for name, task, outputs in cases:
        info = own_info(own("npz", tmp_path / f"{name}.npz", task=task))
        assert (info.task.name, info.num_classes) == (task, outputs)
        expected = np.eye(3)[[2, 0, 1]].tolist() if task == "multi-label" else [2, 0, 1]
        assert load_dataset(info).train.targets.tolist() == expected


@pytest.mark.parametrize("labels", [[1, 2], [0, 2], [0, 1], [1], [2]])
def test_labels_below_num_classes_are_the_classes_whichever_are_absent(
    tmp_path: Path, labels: list[int]
) -> None:
    """A hospital without class 0 numbers classes like a hospital without class 2."""
    y = np.array([labels[at % len(labels)] for at in range(12)])
    np.savez(tmp_path / "t.npz", x=np.arange(12.0)[:, None], y=y)
    for keys in ({"num_classes": 3}, {"task": "binary"}):
        if max(labels) > 1 and "task" in keys:
            continue
        data = load_dataset(own_info(own("npz", tmp_path / "t.npz", **keys)))
        rows = (
            torch.cat([data.train.inputs[:, 0], data.test.inputs[:, 0]]).int().tolist()
        )
        assert (
            torch.cat([data.train.targets, data.test.targets]).tolist()
            == y[rows].tolist()
        )


def test_an_empty_folder_holds_the_number_of_its_class(tmp_path: Path) -> None:
    """A client without cats numbers its dogs as the other clients do."""
    write_images(tmp_path, {"cat": 0, "dog": 4})
    info = own_info(own("folder", tmp_path, num_classes=2, test_share=0.25))
    assert info.class_names == ("cat", "dog")
    assert load_dataset(info).train.labels.tolist() == [1, 1, 1]


def test_the_home_folder_may_be_written_as_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    np.savez(tmp_path / "t.npz", x=np.zeros((10, 2)), y=np.arange(10) % 2)
    config = Config.make({"dataset": "npz:~/t.npz", "out": "~/o"})
    assert (config.dataset, config.out) == (
        f"npz:{tmp_path / 't.npz'}",
        str(tmp_path / "o"),
    )
    paths = [
        name
        for name, field in Fields.model_fields.items()
        if field.annotation is str
        and re.search("folder|absolute path", str(field.description))
    ]
    assert {"data_dir", "init", "fedtan_tls_dir"} < {*paths}
    for name in paths:
        read = Fields.model_validate({name.replace("_", "-"): "~/x"})
        assert getattr(read, name) == str(tmp_path / "x"), name
    for where in (
        {"run_config": {"state-dir": "~/s"}},
        {"node_config": {"state-dir": "~/s"}},
    ):
        context = Context(
            1,
            1,
            **{"node_config": {}, "run_config": {}, "state": RecordDict(), **where},
        )
        assert state_dir(context) == tmp_path / "s"


def test_names_with_commas_stand_in_quotes(tmp_path: Path) -> None:
    assert listed('a, "b, c" ,d') == ["a", "b, c", "d"]
    write_images(
        tmp_path,
        {f"{site}/{label}": 2 for site in ("n, 1", "s, 1") for label in ("cat", "dog")},
    )
    keys = {
        "dataset": f"folder:{tmp_path}",
        "model": "lenet",
        "held-out-clients": '"s, 1"',
        "num-clients": 1,
    }
    assert partitioned_data(Config.make(keys), 1).held_out_names == ("s, 1",)
