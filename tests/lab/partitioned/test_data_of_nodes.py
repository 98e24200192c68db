"""Own data that only the nodes have.

They come from a function of the node's ``data-path``, or from ``dataset=folder:``
without a path.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fedbn_flwr.errors import ConfigError, DataError, FedBNError
from fedbn_flwr.lab.config import Config, data_of
from fedbn_flwr.lab.data import load_dataset, own_info
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data, whole_data
from fedbn_flwr.lab.runs.run import run
from tests.support.runs import lines_of
from tests.support.tables import Pairs, named, write_images

SETTINGS = {
    "num-server-rounds": 2,
    "local-steps": 2,
    "batch-size": 8,
    "eval-on": "personal-own",
}
IMAGES = {
    **SETTINGS,
    "dataset": "folder:",
    "num-server-rounds": 1,
    "image-size": 28,
    "num-classes": 2,
    "task": "classification",
}


@pytest.fixture
def tables(tmp_path, monkeypatch) -> tuple[dict, list[Path]]:
    """Provide the settings of a run on tables, and the table of each client."""
    paths = []
    for client, name in enumerate(("east", "north", "west")):
        rng = np.random.default_rng(client)
        age, tests = rng.normal(50 + 5 * client, 10, 30), np.arange(30) % 5 == 4
        table = pd.DataFrame(
            {"age": age, "bmi": rng.normal(25, 4, 30), "sick": age > 55}
        )
        table["patient"] = np.arange(30) // 2 + 50 * tests
        table["part"] = np.where(tests, "test", "train")
        paths.append(tmp_path / f"{name}.csv")
        table.to_csv(paths[-1], index=False)

    def patients(site: int | str, part: str) -> Pairs:
        path = site if isinstance(site, str) else paths[site]
        table = pd.read_csv(path, dtype={"patient": str})
        table = table[table["part"] == part]
        inputs = torch.tensor(table[["age", "bmi"]].to_numpy("float32")) / 50
        sick = table["sick"].astype(int).tolist()
        return Pairs(inputs, sick, targets=sick, groups=table["patient"].tolist())

    patients.input_shape = (2,)  # type: ignore[attr-defined]
    dataset = {"dataset": named(monkeypatch, patients), "task": "binary"}
    return {**SETTINGS, **dataset, "validation-share": 0.25}, paths


def at(*paths: Path) -> list[dict]:
    return [{"data-path": str(path)} for path in paths]


def test_the_bits_of_one_data_set_with_natural_clients(
    served, tables, tmp_path
) -> None:
    """The validation rows have the same bits, and no patient is divided."""
    settings, paths = tables
    settings["strategy"] = "fedbn"
    alone, lines = served(settings, at(*paths))
    whole = run(Config.make({**settings, "num-clients": 3}), tmp_path / "together")
    assert alone["sha256"] == whole["sha256"]
    assert alone["final"] == whole["final"]
    assert [line["participants"] for line in lines] == [[0, 1, 2]] * 2


def test_a_site_of_one_patient_validates_nothing_alone_or_together(tables) -> None:
    """A patient is not divided, so all rows of the site are training rows."""
    settings, paths = tables
    table = pd.read_csv(paths[1])
    table.assign(patient=1).to_csv(paths[1], index=False)
    config = Config.make({**settings, "num-clients": 3})
    together = partitioned_data(config, 3)
    for site in range(3):
        own = replace(data_of(config).own, sites=(site,), of_node=True)
        alone = whole_data(config, load_dataset(own_info(own)), site)
        assert len(alone.train[0]) == len(together.train[site]), site
        assert len(alone.validation[0]) == len(together.validation[site]), site
    assert [len(part) == 0 for part in together.validation] == [False, True, False]


def test_a_common_test_set_on_nodes_with_their_own_data_is_refused_before_round_1(
    served, tmp_path
) -> None:
    write_images(tmp_path / "0", {"cat": 10, "dog": 10})
    settings = {**IMAGES, "eval-on": "personal-own,personal-global"}
    with pytest.raises(
        ConfigError,
        match=r"eval-on=personal-global.*data-path has only its own.*personal-own",
    ):
        served(settings, at(tmp_path / "0"))
    assert not lines_of(tmp_path / "out")


def test_what_the_server_must_know_of_the_data_is_in_the_config(
    served, tmp_path
) -> None:
    write_images(tmp_path / "0", {"cat": 10, "dog": 10})
    with pytest.raises(
        DataError, match=r"only the nodes have the data.*eval-on=personal-own"
    ):
        served({**IMAGES, "eval-on": "global"}, at(tmp_path / "0"))
    with pytest.raises(FedBNError, match=r"only the nodes have the data.*data-path"):
        run(Config.make({**IMAGES, "num-clients": 2}), tmp_path / "run")
    with pytest.raises(
        ConfigError,
        match=r"held-out-clients='a' has no effect: only the nodes have the data",
    ):
        Config.make({**IMAGES, "held-out-clients": "a"})
