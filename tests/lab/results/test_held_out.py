"""Clients that never train contribute nothing to training.

Each of their tests is computed by hand in float64.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config, listed
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.lab.results import tester
from fedbn_flwr.lab.results.sites import sites_of_run
from fedbn_flwr.lab.results.tests_table import read_tests
from fedbn_flwr.lab.runs.run import run
from tests.support.options import kebab
from tests.support.runs import lines_of, state_of
from tests.support.tables import in_places, table, write_images

NAMES = ("a", "b", "c", "d")
SHIFTS = (-3.0, 0.0, 4.0, 0.5)
SETTINGS = {
    "num-server-rounds": 2,
    "local-steps": 3,
    "batch-size": 8,
    "learning-rate": 0.05,
}


class Table:
    """Rows of four clients. Each client has training and test rows."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.client = np.repeat(NAMES, 40)
        self.tests = np.tile(np.arange(40) % 4 == 3, len(NAMES))
        self.x = rng.normal(np.repeat(SHIFTS, 40)[:, None], [1, 2, 3], (160, 3))
        self.y = (self.x.sum(1) + rng.normal(size=160) > 0).astype(np.int64)

    def save(self, monkeypatch: pytest.MonkeyPatch, without: str = "") -> str:
        rows = self.client != without
        arrays = (self.x, self.y, self.client, self.tests)
        return table(monkeypatch, *(array[rows] for array in arrays))

    def rows(self, client: str, tests: bool) -> tuple[Tensor, Tensor]:
        """Return the rows of a client and their targets."""
        own = (self.client == client) & (self.tests == tests)
        return torch.tensor(self.x[own]).float().double(), torch.tensor(self.y[own])


def held_out_of(out: Path) -> pd.DataFrame:
    """Return the tests of the sites that never train."""
    tests = read_tests(out)
    return tests[tests["part"] == "held-out"]


@pytest.fixture
def start(tmp_path) -> Callable:
    """Provide ``start(dataset, **settings)`` to run in a folder of the test.

    It returns the summary, lines and folder.
    """

    def do(dataset: str, out: str = "out", **settings):
        keys = kebab(settings)
        names = sys.modules[dataset.partition(":")[0]].rows.site_names
        held_out = listed(keys.get("held-out-clients", ""))
        keys["num-clients"] = len(names) - len(held_out)
        folder = tmp_path / out
        summary = run(Config.make({**SETTINGS, "dataset": dataset, **keys}), folder)
        return summary, lines_of(folder), folder

    return do


@pytest.mark.parametrize(
    ("strategy", "name", "given"), [("fedavg", "d", "d1"), ("fedbn", "b", "b")]
)
def test_the_run_has_the_bits_of_one_without_their_data(
    strategy: str, name: str, given: str, start, monkeypatch
) -> None:
    table, keys = Table(), {"strategy": strategy, "validation_share": 0.2}
    if strategy == "fedbn":
        # As with held-out clients, the saved model has the averaged BN.
        keys["eval_on"] = "personal-own,averaged-bn"
    whole = table.save(monkeypatch)
    alone, _, _ = start(table.save(monkeypatch, name), "rest", **keys)
    for held_out in given:
        summary, lines, out = start(whole, held_out, held_out_clients=held_out, **keys)
        assert summary["sha256"] == alone["sha256"], held_out
        assert {*held_out_of(out)["site"]} == {name}
        assert all(line["participants"] == [0, 1, 2] for line in lines)
        # Their tests come on top.
        assert summary["final"].items() > alone["final"].items()


@pytest.mark.parametrize("strategy", ["fedavg", "silobn"])
def test_the_tests_are_those_of_the_saved_model_by_hand(
    strategy: str, start, monkeypatch
) -> None:
    """Statistics are saved, or measured on the training rows, or both mixed.

    Test-time BN mixes in the statistics of a client's own 10 test rows.
    """
    table, which = Table(), {"fedavg": "global", "silobn": "averaged"}[strategy]
    keys = {"strategy": strategy, "metrics": "loss", "test_bn": "mix"}
    summary, lines, out = start(table.save(monkeypatch), held_out_clients="a,d", **keys)
    saved = {name: value.double() for name, value in state_of(out).items()}
    losses = {which: [], "adapted": [], "test-bn": []}
    last = held_out_of(out)
    last = last[last["round"] == len(lines)]
    assert {*last["examples"]} == {10}
    bn = {"global": "running", "averaged": "averaged-bn"}
    for name in ("a", "d"):
        x, y = table.rows(name, True)
        found = last[last["site"] == name].set_index(["bn", "metric"])["value"]
        for test, inputs, share in (
            (which, x, 1.0),
            ("adapted", table.rows(name, False)[0], 0.0),
            ("test-bn", x, 16 / (16 + 10)),
        ):
            seen, own = (
                F.linear(rows, saved["hidden.weight"], saved["hidden.bias"])
                for rows in (x, inputs)
            )
            mean = saved["norm.running_mean"].lerp(own.mean(0), 1 - share)
            var = saved["norm.running_var"].lerp(own.var(0, correction=0), 1 - share)
            affine = saved["norm.weight"], saved["norm.bias"]
            normal = F.batch_norm(seen, mean, var, *affine)
            logits = F.linear(normal.relu(), saved["fc.weight"], saved["fc.bias"])
            loss = F.cross_entropy(logits, y).item()
            of_test = found[bn.get(test, test)]
            right = (logits.argmax(1) == y).double()
            assert of_test["accuracy"] == pytest.approx(right.mean().item())
            assert of_test["loss"] == pytest.approx(loss, rel=1e-4)
            losses[test].append(loss)
    for test, of_both in losses.items():
        mean = summary["final"][f"held-out-{test}-loss"]
        assert mean == pytest.approx(np.mean(of_both), rel=1e-4)
    sites = summary["sites"]
    held_out = [(row["site"], row["examples"]) for row in sites if "held-out" in row]
    assert held_out == [("a", 10), ("d", 10)]
    values = [row["value"] for row in sites]
    assert values[2:] == pytest.approx(losses[which], rel=1e-4)
    again = [row["value"] for row in sites_of_run(out).rows]
    assert again == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize("names", ["0123", "2345", "wxyz"])
def test_a_number_is_a_count_or_with_a_comma_a_name_but_never_both(
    names: str, tmp_path
) -> None:
    data = write_images(tmp_path / names, in_places(2, *names))
    for number in map(str, range(4)):
        found = []
        for held_out in (number, f"{number},"):
            with contextlib.suppress(ConfigError):
                config = Config.make(
                    {**SETTINGS, "dataset": data, "held-out-clients": held_out}
                )
                split = partitioned_data(config, count_clients(config))
                found.append(split.held_out_names)
        last = tuple(names[4 - int(number) :])
        assert found == [(number,) if number in names else last]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"held-out-clients": "e"}, r"unknown held-out client 'e'.*a, b, c, d"),
        ({"held-out-clients": "a,b,c,d"}, "'a,b,c,d' leaves none of the 4 clients"),
        ({"held-out-clients": 4}, "'4' leaves none of the 4 clients to train"),
        ({"held-out-clients": 5}, "'5' leaves none of the 4 clients to train"),
        ({"held-out-clients": 7}, "'7' leaves none of the 4 clients to train"),
        ({"held-out-clients": -1}, r"unknown held-out client '-1'"),
        (
            {"held-out-clients": "a", "partition": "iid", "num-clients": 2},
            r"names clients, but partition=iid has no names",
        ),
        (
            {"held-out-clients": "a", "strategy": "standalone"},
            r"held-out-clients='a' has no effect: standalone shares no model",
        ),
    ],
)
def test_what_cannot_be_held_out_is_refused(settings, message: str, tmp_path) -> None:
    data = write_images(tmp_path / "all", in_places(10, *NAMES))
    assert Config.make({"held-out-clients": 0}).held_out_clients == "", "none"
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        run(Config.make({**SETTINGS, "dataset": data, **settings}), tmp_path / "out")
    assert not (tmp_path / "out/metrics.jsonl").exists()


@pytest.mark.parametrize("most", [3, 4])
def test_a_table_by_site_has_a_row_for_each_or_none(
    start, monkeypatch, most: int
) -> None:
    monkeypatch.setattr(tester, "_MOST_SITES", most)
    summary, _, _ = start(Table().save(monkeypatch), held_out_clients="d")
    names = [row["site"] for row in summary.get("sites", [])]
    assert names == ([*NAMES] if most == 4 else [])


@pytest.mark.parametrize("strategy", ["silobn", "fedavg"])
def test_each_test_of_eval_on_stays_beside_held_out_sites(
    strategy: str, start, monkeypatch
) -> None:
    tests = (
        "averaged-bn,recalibrated" if strategy == "silobn" else "global,recalibrated"
    )
    dataset = Table().save(monkeypatch)
    keys = {"strategy": strategy, "eval_on": tests}
    _, _, alone = start(dataset, "alone", **keys)
    _, _, out = start(dataset, held_out_clients="d", **keys)
    found, known = read_tests(out), read_tests(alone)
    found = found[found["part"] == "test"]
    assert {*known[known["part"] == "test"]["bn"]} <= {*found["bn"]}
