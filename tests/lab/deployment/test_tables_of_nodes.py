"""Three nodes with a table each, over a network: the intervals that their owners let out, and one scale under masks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.deployment import Federation
from fedbn_flwr.lab.runs.run import run

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.xdist_group("network")]
ROOT = Path(__file__).parents[3]
NAMES = ("east", "north", "west")
TABLE = {
    **{"label-column": "sick", "split-column": "part", "feature-columns": "age,chol", "missing": "mean"},
    **{"task": "binary", "class-names": "0,1", "model": "mlp", "mlp-hidden": "4", "eval-on": "personal-own"},
    **{"num-server-rounds": 1, "local-steps": 2, "eval-every": 1, "standardise": "federated", "learning-rate": 0.1},
}


@pytest.fixture(scope="module")
def tables(scratch: Path) -> Path:
    """The folder of the tables: 80 rows of 40 patients, half of them for tests."""
    folder = scratch / "tables"
    folder.mkdir()
    for client, name in enumerate(NAMES):
        draw, lines = np.random.default_rng(client), ["age,chol,part,sick,patient"]
        for row in range(80):
            age, chol = draw.normal(50 + 5 * client, 9), draw.normal(250 + 30 * client, 40)
            part = "test" if row % 4 > 1 else "train"
            cell = "" if row == 8 else f"{chol:.1f}"
            lines.append(f"{age:.1f},{cell},{part},{int(age + draw.normal(0, 5) > 55)},{row // 2}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def federation(scratch: Path, tables: Path, at_once: dict[str, str]) -> Iterator[Federation]:
    """The owners of the first two nodes let their intervals out."""
    configs = []
    for client, name in enumerate(NAMES):
        allowed = " report-intervals=true" if client < 2 else ""
        configs.append(f"partition-id={client} num-partitions=3 data-path='{tables / name}.csv'{allowed}")
    environment = {"MPLCONFIGDIR": str(scratch / "matplotlib"), "PATH": at_once["PATH"]}
    with Federation(
        ROOT / "docker-compose.yml", 3, folder=scratch / "net", node_configs=configs, environment=environment
    ) as found:
        yield found


def test_the_intervals_are_those_of_a_run_in_one_place(networked, tables: Path, tmp_path: Path) -> None:
    keys = {**TABLE, "group-column": "patient", "strategy": "fedbn"}
    summary = networked(**keys, dataset="csv:")
    whole = run(Config.make({**keys, "dataset": f"csv:{tables}", "num-clients": 3}), tmp_path / "whole")
    rows, expected = summary["sites"]["sites"], whole["sites"]["sites"]
    figures = ("examples", "groups", "value", "low", "high", "decision")
    assert [{key: row[key] for key in figures} for row in rows[:2]] == [
        {key: pytest.approx(row[key]) if isinstance(row[key], float) else row[key] for key in figures}
        for row in expected[:2]
    ]
    assert [row["decision"] for row in rows[:2]] == ["interval"] * 2
    assert (rows[2]["groups"], rows[2]["low"], rows[2]["value"]) == (None, None, pytest.approx(expected[2]["value"]))
    assert rows[2]["decision"] == "undecidable: the node does not report it (report-intervals)"


def test_one_mean_and_std_under_masks_are_those_of_a_run_in_one_place(networked, tables: Path, tmp_path: Path) -> None:
    """The same bits, as sums of fixed-point numbers are exact; and those of all records in float64."""
    keys = {**TABLE, "strategy": "fedavg", "masked-sums": True, "masked-metrics": "published"}
    keys |= {"feature-ranges": "age:0:120,chol:100:600"}
    networked(**keys, dataset="csv:")
    run(Config.make({**keys, "dataset": f"csv:{tables}", "num-clients": 3}), tmp_path / "whole")
    found, whole = (json.loads((tmp_path / name / "scale.json").read_text()) for name in ("network", "whole"))
    assert (found["mean"], found["std"]) == (whole["mean"], whole["std"])
    rows = np.concatenate([np.genfromtxt(path, delimiter=",", skip_header=1, dtype=str) for path in tables.glob("*")])
    train = np.float32(np.where(rows[:, :2] == "", "nan", rows[:, :2])[rows[:, 2] == "train"]).astype(np.float64)
    np.testing.assert_allclose(found["mean"], np.nanmean(train, 0), rtol=1e-11)
    np.testing.assert_allclose(found["std"], np.nanstd(train, 0), rtol=1e-11)
