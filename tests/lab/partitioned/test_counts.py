"""Before round 1, own data are counted by client and class.

Suspicious counts give warnings.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.data import partition_table
from fedbn_flwr.lab.partitioned.counts import data_counts, data_text, data_warnings
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.lab.results.run_files import RunFiles, run_warnings
from fedbn_flwr.lab.runs.run import run
from tests.support.tables import in_places, table, write_images


def split(settings: dict[str, object]):
    """Return the split of a run with its config."""
    config = Config.make(settings)
    return partitioned_data(config, count_clients(config)), config


@pytest.fixture
def split_of(monkeypatch):
    """Provide ``split_of(settings, **arrays)`` for the split of a table."""
    return lambda settings, **arrays: split(
        {"dataset": table(monkeypatch, **arrays), **settings}
    )


def test_counts_and_held_out_clients(split_of) -> None:
    at = np.arange(12)
    rows = {"x": np.zeros((12, 2)) + at[:, None], "y": at % 2, "split": at % 4 == 0}
    settings = {"num-clients": 2, "held-out-clients": "b"}
    of_run = split_of(settings, **rows, client=[*"aaaabbbbcccc"])
    text = data_text(*of_run)
    assert data_counts(of_run[0]) == {"training": 6, "validation": 0, "test": 2}
    assert "classification, 6 training, 2 test examples of shape (2,)" in text
    assert "client 0 is a, client 1 is c" in text
    assert "held out: b, 3 inputs, 1 test examples" in text
    assert data_warnings(*of_run) == []


@pytest.mark.parametrize("count", [3, 30])
def test_a_class_may_have_the_name_of_a_column(count: int) -> None:
    counts, names = np.arange(2 * count).reshape(2, -1), [*map(str, range(count))]
    plain, same = (
        partition_table(counts, [*first, *names[2:]])
        for first in (("dog123", "cat"), ("client", "all"))
    )
    assert same == plain.replace("dog123", "client").replace("cat", "all")


@pytest.mark.parametrize(
    "apart",
    [{}, {"held-out-clients": "b"}, {"partition": "iid", "held-out-clients": 1}],
)
def test_the_domains_split_the_tests_of_the_clients_that_train(split_of, apart) -> None:
    rows = {"x": np.zeros((60, 1)), "y": np.arange(60) % 2, "client": [*"abc"] * 20}
    split, _ = split_of({"num-clients": 2 if apart else 3, **apart}, **rows)
    found = []
    for name, view in split.domain_views().items():
        assert {*view.groups.tolist()} == {split.dataset.group_names.index(name)}
        found += view.indices.tolist()
    assert sorted(found) == sorted(np.concatenate(split.test).tolist())


def test_classes_that_nobody_trains_on_are_named(split_of) -> None:
    """Client b codes the labels of its tests differently."""
    at, client = np.arange(40), np.repeat(["a", "b"], 20)
    tests, y = at % 4 == 0, at // 4 % 2
    rows = {"x": np.zeros((40, 2)), "client": client, "split": tests}
    assert data_warnings(*split_of({"num-clients": 2}, **rows, y=y)) == []
    rows["y"] = np.where(tests & (client == "b"), y + 2, y)
    (warning,) = data_warnings(*split_of({"num-clients": 2}, **rows))
    assert "test examples of client 1 (b) have classes" in warning
    assert ": 2, 3." in warning
    apart = {"num-clients": 1, "held-out-clients": "b"}
    assert "client b have" in data_warnings(*split_of(apart, **rows))[0]


def test_a_class_that_is_only_validated_has_a_client(split_of) -> None:
    rows = {"x": np.zeros((10, 2)), "y": np.arange(10) // 4}
    split, config = split_of({"num-clients": 1}, **rows)
    parts = {"train": (np.arange(4),), "validation": (np.arange(4, 8),)}
    warnings = data_warnings(replace(split, **parts), config)
    assert "have no client" not in " ".join(warnings)


def test_tests_on_the_training_examples_are_named(split_of, tmp_path) -> None:
    """The run page shows the warning."""
    x, y = np.random.default_rng(0).normal(size=(40, 2)), np.arange(40) // 20
    settings = {"num-clients": 2, "num-server-rounds": 1}
    twice = {"x": np.tile(x, (2, 1)), "y": np.tile(y, 2), "split": np.arange(80) >= 40}
    twice["client"] = np.tile(np.repeat(["a", "b"], 20), 2)
    of_run = split_of(settings, **twice)
    (warning,) = data_warnings(*of_run)
    assert warning.startswith("test examples of client 0 (a) (20 of 20), 1 (b) (20 of")
    run(of_run[1], tmp_path)
    assert warning in run_warnings(RunFiles.read(tmp_path))
    # A quarter of the tests of one site; the other tests are new.
    twice["x"][60:] += 1
    twice["x"][40:55] += 1
    of_run = split_of(settings, **twice)
    assert "client 0 (a) (5 of 20) are equal" in data_warnings(*of_run)[0]


@pytest.mark.parametrize("site", ["b", "3", 'b, "d"'])
def test_a_site_of_tests_is_named_and_can_be_held_out(site: str, tmp_path) -> None:
    """Two messages name the setting that holds it out."""
    folders = in_places(7, "a/train", "c/train") | in_places(3, "a/test", "c/test")
    folders |= in_places(10, f"{site}/test")
    data = {"dataset": write_images(tmp_path / "data", folders)}
    of_run = split(data)
    (warning,) = data_warnings(*of_run)
    start = f"site {site} has 20 test examples but no training example"
    assert warning.startswith(start)
    assert data_counts(of_run[0])["test"] == 32
    setting = warning.rpartition("held-out-clients=")[2]
    with pytest.raises(ConfigError, match="num-clients=2 with held-out-c") as refused:
        split({**data, "num-clients": 3})
    assert f"held-out-clients={setting}." in str(refused.value)
    apart = {"held-out-clients": setting, "num-server-rounds": 1, "strategy": "fedbn"}
    held, config = split({**data, **apart})
    assert data_warnings(held, config) == []
    assert data_counts(held)["test"] == 12
    rows = run(config, tmp_path / "out")["sites"]
    examples = {row["site"]: row["examples"] for row in rows}
    assert [*examples.items()] == [("a", 6), ("c", 6), (site, 20)]


@pytest.mark.parametrize("strategy", ["fedbn", "centralized"])
def test_a_run_without_test_examples_is_refused(tmp_path, strategy: str) -> None:
    """Such a run would end without a result."""
    settings = {
        "dataset": write_images(tmp_path / "data", {"cat": 10, "dog": 10}),
        "num-clients": 2,
        "test-share": 0.001,
        "strategy": strategy,
    }
    with pytest.raises(
        DataError, match=r"folder.* has no test examples .test-share=0\.001\)"
    ):
        run(Config.make(settings), tmp_path / "out")
    assert not (tmp_path / "out").exists()
