"""Nodes with their own data (``data-path`` in the node config).

Some nodes have no data, and two nodes may have one partition.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.data import load_local_dataset
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data

NODES = 3
SETTINGS = {
    "num-server-rounds": 2,
    "local-steps": 2,
    "batch-size": 8,
    "num-clients": NODES,
    "eval-on": "personal-own",
}


def config_of(**settings: Any) -> Config:
    return Config.make(
        {
            **SETTINGS,
            **{key.replace("_", "-"): value for key, value in settings.items()},
        }
    )


@pytest.fixture
def archives(tmp_path: Path) -> list[Path]:
    """Write each client's share of the digits as an npz file."""
    data = partitioned_data(config_of(), NODES)
    paths = []
    for i in range(NODES):
        parts = {}
        for name, samples, own in (
            ("train", data.dataset.train, data.train[i]),
            ("test", data.dataset.test, data.test[i]),
        ):
            parts[f"x_{name}"], parts[f"y_{name}"] = (
                samples.inputs[own, 0].numpy(),
                samples.targets[own].numpy(),
            )
        paths.append(tmp_path / f"node-{i}.npz")
        np.savez(paths[-1], **parts)
    return paths


@pytest.mark.parametrize(
    ("strategy", "share"), [("fedavg", 0.0), ("fedbn", 0.2), ("fedtan", 0.0)]
)
def test_a_local_dataset_and_a_partition_give_the_same_bits(
    strategy, share, served, archives
) -> None:
    config = config_of(strategy=strategy, validation_share=share)
    partitions, _ = served(config, [{}] * NODES, "partitions")
    files, _ = served(config, [{"data-path": str(path)} for path in archives], "files")
    assert files["sha256"] == partitions["sha256"]
    assert files["final"] == partitions["final"]
    assert ("personal-validation-loss" in files["final"]) == bool(share)


@pytest.mark.parametrize("strategy", ["fedavg", "fedtan"])
def test_a_node_without_usable_data_is_rejected_and_the_others_continue(
    strategy, served, archives, tmp_path
) -> None:
    nowhere = tmp_path / "nowhere.npz"
    nodes = [
        {"data-path": str(archives[0])},
        {"data-path": str(nowhere)},
        {"data-path": str(archives[2])},
    ]
    summary, lines = served(config_of(strategy=strategy), nodes)
    assert [line["participants"] for line in lines] == [[0, 2], [0, 2]]
    for line in lines:
        (said,) = line["rejected"]
        assert said.endswith(
            f"(partition 1): data-path={str(nowhere)!r} could not be read: "
            f"[Errno 2] No such file or directory: {str(nowhere)!r}"
        )
        assert set(line["clients"]) == {"0", "2"}
    assert summary["rounds"] == 2


def test_the_server_needs_no_data_where_no_global_test_set_is_asked_for(
    served, archives
) -> None:
    """The images resemble MNIST's, but no process has MNIST's files."""
    nodes = [{"data-path": str(path)} for path in archives]
    summary, _ = served(config_of(dataset="mnist"), nodes)
    assert summary["final"]["personal-own-accuracy"] > 0
    with pytest.raises(DataError, match="data set 'mnist'"):
        served(config_of(dataset="mnist", eval_on="global"), nodes, "global")


def test_the_runs_image_size_and_number_of_classes_apply_to_local_data(
    served, tmp_path
) -> None:
    """Digits have 8 pixels and 10 classes, but this model needs 28 and 12."""
    draws = np.random.default_rng(0)
    for i in range(NODES):
        arrays = {
            "x_train": draws.integers(256, size=(24, 20, 20)),
            "x_test": draws.integers(256, size=(8, 20, 20)),
        }
        labels = {"y_train": np.arange(24) % 12, "y_test": np.arange(8) + 4}
        np.savez(
            tmp_path / f"{i}.npz",
            **{k: v.astype(np.uint8) for k, v in arrays.items()},
            **labels,
        )
    nodes = [{"data-path": str(tmp_path / f"{i}.npz")} for i in range(NODES)]
    summary, lines = served(
        config_of(model="lenet", image_size=28, num_classes=12), nodes
    )
    assert [line["participants"] for line in lines] == [[0, 1, 2]] * 2
    assert summary["rejected"] == 0


# The data themselves.


def images(folder: Path, count: int, value: int) -> None:
    folder.mkdir(parents=True)
    for i in range(count):
        Image.new("L", (8, 8), value + i).save(folder / f"{i}.png")


def test_a_folder_is_read_by_class_number(tmp_path: Path) -> None:
    images(tmp_path / "data/3", 10, 100)
    images(tmp_path / "data/7", 4, 200)
    data = load_local_dataset(str(tmp_path / "data"), "digits", 1, 8)
    assert data.train.targets.tolist() == [3] * 8 + [7] * 4, (
        "every 5th of a class is a test image"
    )
    assert data.train.inputs[:, 0, 0, 0].tolist() == [
        100,
        101,
        102,
        103,
        105,
        106,
        107,
        108,
        200,
        201,
        202,
        203,
    ]
    assert data.test.targets.tolist() == [3, 3]
    assert (data.num_classes, data.mean) == (10, (0.3055,))


def test_a_folder_is_read_by_class_name(tmp_path: Path) -> None:
    images(tmp_path / "data/cat", 1, 0)
    images(tmp_path / "data/dog", 2, 0)
    data = load_local_dataset(
        str(tmp_path / "data"), "cifar10", 3, 32, ("bird", "cat", "dog")
    )
    assert data.train.targets.tolist() == [1, 2, 2]
    assert data.train.inputs.shape == (3, 3, 32, 32)


def test_folders_that_are_called_after_no_class_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder `Melanoma` for 'melanoma' would leave the class without images."""
    for name in ("Melanoma", "naevus", ".cache", "extra"):
        images(tmp_path / "data" / name, 2, 0)
    (tmp_path / "data/readme.txt").write_text("")
    with caplog.at_level(logging.WARNING, "flwr"):
        data = load_local_dataset(
            str(tmp_path / "data"), "cifar10", 3, 32, ("melanoma", "naevus", "wart")
        )
    assert data.train.targets.tolist() == [1, 1]
    assert caplog.messages == [
        f"data-path='{tmp_path}/data': folders whose name is not a class are ignored:"
        " Melanoma, extra. Classes without a folder: melanoma, wart. Names are"
        " case-sensitive. Rename the folders, or name their classes in data-classes."
    ]


def test_unusable_local_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other/cat").mkdir(parents=True)
    (tmp_path / "broken.npz").write_bytes(b"PK no archive")
    small = {"x_train": np.zeros((0, 8, 8), np.uint8), "y_train": np.zeros(0, np.int64)}
    np.savez(
        tmp_path / "none.npz", **small, x_test=small["x_train"], y_test=small["y_train"]
    )
    np.savez(tmp_path / "half.npz", **small)
    full = {
        "x_train": np.zeros((2, 8, 8), np.uint8),
        "x_test": np.zeros((2, 8, 8), np.uint8),
        "y_test": np.arange(2),
    }
    np.savez(tmp_path / "floats.npz", **full, y_train=np.array([0.0, 0.9]))
    cases = {
        "relative": "data-path='relative' is relative",
        str(tmp_path / "absent"): "No such file or directory",
        str(
            tmp_path / "empty"
        ): "no folder has the name of a class (0, 1, 2, 3, 4, ...). Found: .",
        str(
            tmp_path / "other"
        ): "Found: cat. Name the classes in the node config: data-classes='cat,dog'",
        str(tmp_path / "broken.npz"): "could not be read",
        str(tmp_path / "none.npz"): "has no training images",
        str(tmp_path / "half.npz"): "lacks x_test, y_test",
        str(
            tmp_path / "floats.npz"
        ): "float64 labels (2,). Use uint8 images and one integer for each image",
    }
    for path, said in cases.items():
        with pytest.raises(DataError) as caught:
            load_local_dataset(path, "digits", 1, 8)
        assert said in str(caught.value)
        assert path in str(caught.value)
