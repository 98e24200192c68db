"""What is told of own data before round 1: counts by client and class, ranges, and what looks wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.lab.partitioned.report import data_report
from fedbn_flwr.lab.runs.run import run


def report(tmp_path: Path, settings: dict[str, object] | None = None, **arrays: np.ndarray):
    np.savez(tmp_path / "a.npz", **arrays)
    config = Config.make({"dataset": f"npz:{tmp_path / 'a.npz'}", **(settings or {})})
    return data_report(partitioned_data(config, count_clients(config)), config)


def test_counts_ranges_and_held_out_clients(tmp_path: Path) -> None:
    x = np.arange(24.0).reshape(12, 2)
    x[3, 1] = np.nan
    client = np.array(list("aaaabbbbcccc"))
    found = report(
        tmp_path,
        {"missing": "mean", "held-out-clients": "b"},
        x=x,
        y=np.array(["no", "yes"] * 6),
        client=client,
        split=np.arange(12) % 4 == 0,
    )
    assert found.figures["training examples by class"] == {"a": [1, 2], "c": [1, 2]}
    assert found.figures["examples"] == {"training": 6, "validation": 0, "test": 2}
    assert found.figures["held-out clients"] == {"b": {"inputs": 3, "test": 1}}
    assert found.figures["values"] == {"lowest": 2.0, "highest": 23.0, "missing": 1, "sampled": False}
    text = found.text()
    assert "classification, 6 training, 2 test examples of shape (2,), values 2 to 23" in text
    assert "held out: b, 3 inputs, 1 test examples" in text
    assert found.warnings == ()


WRONG = {
    "a client without a class": (
        {"client": np.repeat([0, 1], 10), "y": np.repeat([0, 1], 10)},
        {},
        r"class 0: .* 1\n",
    ),
    "one example": (
        {"client": np.array([0] * 19 + [1]), "split": np.arange(20) % 5 == 1},
        {},
        "client 1 has 1 training example: BatchNorm cannot compute statistics from it alone",
    ),
    "one image": (
        {
            "client": np.array([0] * 19 + [1]),
            "split": np.arange(20) % 5 == 1,
            "x": np.random.default_rng(0).integers(0, 256, (20, 8, 8)).astype(np.uint8),
        },
        {},
        "client 1 has 1 training example: BatchNorm's statistics are those of one example",
    ),
    "no tests": (
        {"client": np.array([0] * 15 + [1] * 5), "split": np.arange(20) < 5},
        {},
        "no test examples: client 1",
    ),
    "bytes of 0 and 1": ({"x": np.random.default_rng(0).integers(0, 2, (20, 4, 4)).astype(np.uint8)}, {}, "multiply"),
    "large numbers": ({"x": 1e6 + np.arange(40.0).reshape(20, 2)}, {}, "reach 1.0+4e"),
    "a constant column": (
        {"x": np.stack([np.arange(20.0), np.ones(20), np.arange(20.0)], 1)},
        {},
        "the same value in all training examples: column 1; leave it out",
    ),
    "a column that is mostly missing": (
        {"x": np.stack([np.arange(20.0), np.where(np.arange(20) % 4, np.nan, np.arange(20))], 1)},
        {"missing": "mean"},
        "missing in more than half of the training examples: column 1",
    ),
    "all the same": ({"x": np.zeros((20, 2))}, {}, "all inputs are 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_looks_wrong(tmp_path: Path, case: str) -> None:
    arrays, settings, message = WRONG[case]
    sound = {"x": np.random.default_rng(0).normal(size=(20, 2)), "y": np.arange(20) % 2}
    clean = report(tmp_path, {"num-clients": 2}, **sound)
    assert clean.warnings == ()
    found = report(tmp_path, {**settings, "num-clients": 2, "model": "mlp"}, **{**sound, **arrays})
    with pytest.raises(AssertionError, match=message):
        raise AssertionError("\n".join(found.warnings))


def test_domains_that_a_copy_lacks_are_named(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for folder in ("usps", "mnist_m"):
        (tmp_path / folder).mkdir()
        x, y = draw.integers(0, 256, (20, 28, 28, 3)).astype(np.uint8), np.arange(20) % 10
        np.savez(tmp_path / folder / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    settings = {"dataset": "digits-five", "data-dir": str(tmp_path), "partition": "domain", "num-clients": 2}
    config = Config.make({**settings, "model": "digits-cnn"})
    assert data_report(partitioned_data(config, 2), config).warnings == (
        "digits-five also has mnist, svhn, synth-digits, not in data-dir: this run has only usps, mnist-m",
    )


def test_the_number_of_classes_of_pixels_is_told(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (6, 4, 4, 3)).astype(np.uint8), np.arange(96).reshape(6, 4, 4) % 5
    model = "torchvision-seg:lraspp_mobilenet_v3_large"
    assert "segmentation with 5 classes, " in report(tmp_path, {"num-clients": 1, "model": model}, x=x, y=y).text()


def test_a_run_writes_and_logs_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((20, 2)), y=np.arange(20) % 2)
    settings = {"dataset": f"npz:{tmp_path / 'a.npz'}", "num-server-rounds": 1, "num-clients": 2}
    run(Config.make(settings), tmp_path / "out", workers=0)
    content = json.loads((tmp_path / "out/data.json").read_text())
    constant = "the same value in all training examples: column 0, column 1; leave it out"
    assert content["warnings"] == [constant, "all inputs are 1"]
    assert content["examples"]["training"] == 16
    assert "all inputs are 1" in caplog.text


@pytest.mark.parametrize("strategy", ["fedbn", "centralized"])
def test_a_run_without_test_examples_is_refused(tmp_path: Path, strategy: str) -> None:
    """It would end without a result."""
    np.savez(tmp_path / "a.npz", x=np.random.default_rng(0).normal(size=(60, 2)), y=np.arange(60) % 2)
    settings = {"dataset": f"npz:{tmp_path / 'a.npz'}", "num-clients": 2, "test-share": 0.001, "strategy": strategy}
    with pytest.raises(DataError, match=r"npz.*: 0 of the 60 examples are test examples .test-share=0\.001\)"):
        run(Config.make(settings), tmp_path / "out", workers=0)
    assert not (tmp_path / "out").exists()


def test_a_model_for_grey_images_says_that_colours_are_lost(tmp_path: Path) -> None:
    """Two colours of the same brightness are one grey."""
    for kind, colour in (("a", (200, 0, 0)), ("b", (0, 102, 0)), ("grey", (60, 60, 60))):
        (tmp_path / "i" / kind).mkdir(parents=True)
        for at in range(4):
            Image.new("RGB", (40, 40), colour).save(tmp_path / "i" / kind / f"{at}.jpg")

    def told(**keys: object) -> list[str]:
        config = Config.make({"dataset": f"folder:{tmp_path / 'i'}", "num-clients": 1, **keys})
        return [text for text in data_report(partitioned_data(config, 1), config).warnings if "colours" in text]

    (warning,) = told()
    assert "takes grey images" in warning
    assert "from 40 to 28 pixels" in warning
    assert told(model="lenet") == []
    for kind in "ab":
        for path in (tmp_path / "i" / kind).iterdir():
            Image.new("RGB", (40, 40), (9, 9, 9)).save(path)
    assert told() == []
    y = np.arange(6) % 2
    shape = (6, 30, 30, 3)
    grey = report(tmp_path, {"num-clients": 1}, x=np.full(shape, 9, np.uint8), y=y)
    tinted = report(tmp_path, {"num-clients": 1}, x=np.full(shape, [9, 90, 9], np.uint8), y=y)
    assert [any("colours" in text for text in found.warnings) for found in (grey, tinted)] == [False, True]
