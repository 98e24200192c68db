"""The table of tests has every test once, and the lines have its means."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from fedbn_flwr.lab.results.tester import enough_examples
from fedbn_flwr.lab.results.tests_table import (
    GLOBAL_TESTS,
    HELD_OUT,
    Measured,
    in_line,
    of_clients,
)
from fedbn_flwr.server.methods.params import TEST_BN
from fedbn_flwr.training.tasks import CLASSIFICATION

NAMES = ("loss", "mae", "r2")


def drawn(seed: int, server_round: int = 1) -> list[Measured]:
    """Return a round's tests at clients, at held-out sites and by the server."""
    draw = np.random.default_rng([seed, server_round])
    replies = {}
    for client in range(6):
        diverged = draw.random() < 0.1
        reply = replies[str(client)] = {}
        for test in ("own", "global", "validation", "domain-far, west"):
            values = np.where(diverged, math.nan, draw.random(3))
            values[2] = math.nan if draw.random() < 0.4 else values[2]
            reply |= {f"{test}-{one}": v for one, v in zip(NAMES, values, strict=True)}
            reply[f"{test}-num-examples"] = int(draw.integers(4))
    found = list(of_clients(server_round, replies, {"0": "a, 0", "1": "07"}))

    def add(site: str, part: str, examples: int, bn: str) -> None:
        for name in NAMES:
            place = (server_round, None, site, part, examples, "global", bn)
            found.append(Measured(*place, name, float(draw.random())))

    for site in ("x", "y, z", 'quoted "q"'):
        for bn in ("averaged-bn", "adapted", TEST_BN.strip("-"))[: draw.integers(1, 4)]:
            add(site, HELD_OUT, 5, bn)
    for _, part, bn in GLOBAL_TESTS.values():
        for where in {part, "domain-a" if part == "test" else part}:
            add("", where, 9, bn)
    return found


@pytest.mark.parametrize("first", [0, 2, 6])
@pytest.mark.parametrize("seed", range(8))
def test_means_over_sites_are_those_of_pandas(seed: int, first: int) -> None:
    """They leave out undefined values, but not a site that diverged.

    Only clients from ``first`` on have enough examples.
    """
    tests = drawn(seed)

    def enough(test: Measured) -> bool:
        return test.client is None or test.client >= first

    line = in_line(tests, "ababab".__getitem__, enough)
    table = pd.DataFrame(tests)
    table["loss"] = table["value"].where(table["metric"] == "loss")
    loss = table.groupby(["site", "part", "bn"])["loss"].transform("max")
    table = table[table["value"].notna() | loss.isna()]
    own = table[(table["model"] == "own") & (table["part"] == "test")]
    for name in NAMES:
        every = own[own["metric"] == name]
        mine = every[every["client"] >= first]
        key = f"personal-own-{name}"
        assert line[key] == pytest.approx(mine["value"].mean(skipna=False), nan_ok=True)
        tested = sum(
            (test.part, test.model, test.metric) == ("test", "own", name)
            for test in tests
        )
        assert line.get(f"{key}-clients", tested) == len(mine)
        for at, domain in enumerate("ab" if name != "loss" else ""):
            here = mine[mine["client"] % 2 == at]["value"]
            if len(every[every["client"] % 2 == at]):
                mean = pytest.approx(here.mean(skipna=False), nan_ok=True)
                assert line[f"{key}/{domain}"] == mean
        held_out = table[(table["part"] == HELD_OUT) & (table["metric"] == name)]
        for bn, of_bn in held_out.groupby("bn"):
            key = f"held-out-{'averaged' if bn == 'averaged-bn' else bn}-{name}"
            assert line[key] == pytest.approx(of_bn["value"].mean())
            assert line.get(f"{key}-clients", 3) == len(of_bn)
        for prefix, part, bn in GLOBAL_TESTS.values():
            of_all = (table["site"] == "") & (table["metric"] == name)
            row = table[of_all & (table["part"] == part) & (table["bn"] == bn)]
            assert line[f"{prefix}-{name}"] == row["value"].item()
    assert all(isinstance(value, int | float) for value in line.values())


class _View:
    units = None

    def __init__(self, size: int) -> None:
        self.targets = torch.arange(size) % 2

    def __len__(self) -> int:
        return len(self.targets)


@pytest.mark.parametrize(("sizes", "count"), [((60, 1), (1, 0)), ((1, 1), (1, 1))])
def test_if_no_client_has_enough_examples_all_count(sizes, count) -> None:
    views = [_View(size) for size in sizes]
    data = SimpleNamespace(
        train=views, test_view=views.__getitem__, validation_view=views.__getitem__
    )
    enough = enough_examples(data, CLASSIFICATION)
    found = []
    for client, view in enumerate(views):
        about = (1, client, "", "test", len(view), "own", "running", "accuracy", 1.0)
        found.append(int(enough(Measured(*about))))
    assert tuple(found) == count
