"""Names of sites, from each source to everything that shows a site."""

from __future__ import annotations

import html
import json
import logging
import random
import unicodedata
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Context, RecordDict
from torch.utils.data import TensorDataset

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.data import Dataset, Samples
from fedbn_flwr.lab.diagnose_run import diagnose_run
from fedbn_flwr.lab.partitioned.counts import names_of
from fedbn_flwr.lab.partitioned.partitioned_data import (
    PartitionedData,
    partitioned_data,
)
from fedbn_flwr.lab.results.sites import last_tests, sites_of_run
from fedbn_flwr.lab.results.tests_table import site_names_of
from fedbn_flwr.lab.runs.check_start import checked_config
from fedbn_flwr.lab.runs.node import client_fn
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.messages.site_names import as_list, fault_of, texts_of
from tests.support.commands import output_of
from tests.support.runs import QUICK, lines_of, page_of, summary_of
from tests.support.tables import Pairs, generator_of, named

HARD = ("7", "07", "Köln/Süd, 1", '<b>&"', "[b]ä" * 20)
SETTINGS = {**QUICK, "num-clients": len(HARD)}
SETTINGS |= {"strategy": "fedbn", "eval-on": "personal-own"}


def numbers(site: int, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``4 * (site + 2)`` examples, a quarter of them of the test part."""
    count = (site + 2) * (1 if part == "test" else 3)
    inputs = torch.randn(count, 3, generator=generator_of(site, part))
    return inputs, torch.arange(count) % 2


def rows(site: int | str, part: str) -> TensorDataset:
    return TensorDataset(*numbers(int(str(site)[-1]), part))


@pytest.fixture
def by_function(monkeypatch) -> Callable:
    """Provide ``by_function(function=rows)`` for the settings of a run on its sites."""
    return lambda function=rows: {**SETTINGS, "dataset": named(monkeypatch, function)}


def named_nodes() -> list[dict]:
    """Return the configs of nodes with the hard names."""
    part = {"num-partitions": len(HARD)}
    return [
        {**part, "partition-id": at, "site-name": name} for at, name in enumerate(HARD)
    ]


def test_a_name_has_1_to_80_characters_of_any_script_and_none_that_is_invisible() -> (
    None
):
    for number in range(0x3001):
        one = chr(number)
        kind = unicodedata.category(one)
        good = kind == "Zs" or kind[0] not in "CZ" or one in "\u200c\u200d"
        assert (f"U+{number:04X}" not in fault_of(f"a{one}")) == good
    for length in range(99):
        assert (fault_of("e" * length) == "") == (1 <= length <= 80)


def test_a_client_has_the_name_of_its_only_group_if_all_such_names_differ() -> None:
    """Names of nodes may be equal. Their texts differ."""
    draw = random.Random(0)
    for _ in range(200):
        known, groups = tuple(draw.sample("012a", 3)), draw.choices(range(3), k=6)
        samples = Samples(torch.zeros(6, 1), None, torch.tensor(groups))
        data = Dataset("", samples, samples, 1, (), (), known)
        owners = np.array(draw.choices(range(3), k=6))
        parts = tuple(np.flatnonzero(owners == client) for client in range(3))
        alone = {}
        for client, part in enumerate(parts):
            if len({groups[at] for at in part}) == 1:
                alone[str(client)] = known[groups[part[0]]]
        count = Counter(alone.values())
        differ = max(count.values(), default=1) == 1
        wanted = {at: name for at, name in alone.items() if differ and name != at}
        assert names_of(PartitionedData(data, parts, parts, None)) == wanted
        for at, text in texts_of(alone).items():
            name = alone[at]
            assert text == (name if count[name] == 1 else f"client {at} ({name})")


def test_everything_shows_the_names_of_the_nodes_in_their_order(
    by_function, served, tmp_path, monkeypatch
) -> None:
    """The number of examples of a site shows which site a row belongs to.

    Names of nodes replace the names of the data.
    """
    names = [f"{name[:60]} of the data" for name in HARD]
    monkeypatch.setattr(rows, "site_names", names, raising=False)
    sites, out = list(enumerate(HARD)), tmp_path / "out"
    examples = {name: site + 2 for site, name in sites}
    served({**by_function(), "strategy": "fedavg"}, named_nodes())

    # The files of the run, and its rows by site.
    assert [*site_names_of(out).items()] == [(str(at), name) for at, name in sites]
    predicted = pd.read_csv(out / "predictions.csv", dtype={"site": str})
    assert [*predicted["site"].unique()] == [*HARD]
    of_run = summary_of(out)["sites"]
    for found in (of_run, sites_of_run(out).rows, sites_of_run(out, out).rows):
        assert [(row["client"], row["site"]) for row in found] == sites
        assert {row["site"]: row["examples"] for row in found} == examples

    # The screen, the page and the doctor.
    screen = output_of("evaluate", out).splitlines()
    for (at, name), shown in zip(sites, screen[1:], strict=False):
        assert shown.split("  ")[0] == name
        assert shown.removeprefix(name).split()[0] == str(at)
    page = html.unescape(page_of(out))
    places = [page.index(f">{name}</th>") for name in HARD]
    assert places == sorted(places)
    assert [row["site"] for row in last_tests(out, "own")] == [*HARD]
    diagnosis = diagnose_run(out).to_json()
    numbered = [f"{at} ({name})" for at, name in sites]
    assert diagnosis["measures"]["clients"] == numbered


def test_refusals_and_absences_name_the_site(by_function, tmp_path, caplog) -> None:
    class Lazy(Pairs):
        site_names = HARD

        def __init__(self, site: int, part: str) -> None:
            inputs, targets = numbers(site, part)
            super().__init__(inputs, targets, targets=targets)
            self.damaged = (part, site) in (("train", 2), ("test", 3))

        def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
            if self.damaged and at == len(self) - 1:
                raise OSError("the file is damaged")
            return super().__getitem__(at)

    config = Config.make({**by_function(Lazy), "batch-size": 0})
    with caplog.at_level(logging.INFO, logger="flwr"):
        run(config, tmp_path)
    line = lines_of(tmp_path)[0]
    assert line["participants"] == [0, 1, 3, 4]
    assert [*line["missing"]] == [HARD[2]], "client 3 took part, and its test failed"
    reason, _ = line["rejected"]
    assert "(partition 2, Köln/Süd, 1): " in reason
    assert f"site 2 ({HARD[2]}), part 'train'" in reason
    assert f"4 of 5 clients; missing: 2 ({HARD[2]})" in caplog.text


def test_a_protected_run_has_only_the_numbers(by_function, served, caplog) -> None:
    """A name would reveal more of a client than its number."""
    settings = {"strategy": "fedavg", "eval-on": "global"}
    settings |= {"dp": "server", "num-classes": 2}
    with caplog.at_level(logging.INFO, logger="flwr"):
        _, lines = served({**by_function(), **settings}, named_nodes())
    text = json.dumps(lines, ensure_ascii=False) + caplog.text
    assert not any(name in text for name in HARD[2:])
    assert all(line["participants"] == [0, 1, 2, 3, 4] for line in lines)


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (["a", "b"], "has 2 names, but the run has 5 sites"),
        ("abcde", "has 0 names"),
        ([*"abcda"], "'a' is there 2 times"),
        ([*"abcd "], "' ' is empty"),
        ([*"abcd", 7], "7 is not a text"),
        (7, "'int' object is not iterable"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_bad_names_of_a_function_are_refused_before_any_work(
    names, fault: str, by_function
) -> None:
    def never(site: int, part: str) -> TensorDataset:
        raise AssertionError("the function was called")

    never.site_names = names  # type: ignore[attr-defined]
    settings = by_function(never)
    with pytest.raises((ConfigError, DataError)) as refused:
        checked_config(Config.make(settings))
    assert f"dataset='{settings['dataset']}': site_names: " in str(refused.value)
    assert fault in str(refused.value)


@pytest.mark.parametrize("name", HARD)
def test_each_site_of_a_function_can_be_held_out(
    name, by_function, monkeypatch
) -> None:
    """A number is refused, because the last clients could be meant."""
    monkeypatch.setattr(rows, "site_names", HARD, raising=False)
    for text in (name, as_list([name])):
        apart = {"num-clients": len(HARD) - 1, "held-out-clients": text}
        refused = pytest.raises(ConfigError, match=f"'{text}' is a number of clients")
        with refused if text.isdecimal() else nullcontext():
            config = Config.make({**by_function(), **apart})
            split = partitioned_data(config, config.num_clients)
            assert split.held_out_names == (name,)


@pytest.mark.parametrize("name", [7, ""])
def test_a_node_refuses_a_bad_name_in_its_config(name, by_function) -> None:
    config = {**named_nodes()[0], "site-name": name}
    of_run = Config.make(by_function()).to_mapping()
    context = Context(1, 1, config, RecordDict(), of_run)
    with pytest.raises(ConfigError, match="site-name in the node's config: "):
        client_fn(context)
