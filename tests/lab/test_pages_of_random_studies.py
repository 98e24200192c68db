"""Pages of random small studies are written and claim little about copies.

A study has one to six sites of 5 to 400 rows with 0 to 50 % events. Its six runs are
copies of one method: their scores have the same signal, and noise of the same size. The
page compares a run with two copies.
"""

from __future__ import annotations

import html
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.finished_runs import sites
from fedbn_flwr.lab.output import site_tests
from fedbn_flwr.lab.output.site_tests import SiteTest
from fedbn_flwr.lab.report import write_report
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.training.tasks import BINARY

RUNS = "abcdef"


def rows(site: int, part: str) -> TensorDataset:
    inputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(site))
    return TensorDataset(inputs, (torch.arange(20) % 2).long())


rows.input_shape = (3,)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template") / "run"
    settings = {"dataset": f"{__name__}:rows", "task": "binary", "metrics": "auroc"}
    settings |= {"num-clients": 2, "num-server-rounds": 1, "local-steps": 1}
    run(Config.make({**settings, "eval-on": "personal-own"}), folder)
    return folder


def drawn(draw: np.random.Generator) -> list[list[SiteTest]]:
    """Return the tests of each run at each site."""
    task = replace(BINARY.scored_by("auroc"), metrics=("auroc",))
    found: list[list[SiteTest]] = [[] for _ in RUNS]
    noise = draw.uniform(0, 2)
    for at in range(draw.integers(1, 7)):
        size = int(np.exp(draw.uniform(np.log(5), np.log(400))))
        truth = draw.random(size) < draw.uniform(0, 0.5)
        signal = draw.uniform(0, 2) * truth + draw.normal(size=size)
        for own in found:
            scores = torch.from_numpy(signal + noise * draw.normal(size=size))[:, None]
            groups = [np.array([row]) for row in range(size)]
            targets = torch.from_numpy(truth.astype(float))
            own.append(SiteTest(task, scores, targets, groups, name=f"site {at}"))
    return found


def written(template: Path, folder: Path, tests: list[SiteTest]) -> None:
    """Write the folder of a run with these tests."""
    shutil.copytree(template, folder)
    (folder / "tests.csv").unlink()  # the tests are those in the lines
    values = [float(one.draws[0]) for one in tests]
    known = [None if value != value else value for value in values]
    table, clients = [], {}
    for at, (one, value) in enumerate(zip(tests, known, strict=True)):
        count = len(one.targets)
        row = {"site": one.name, "client": at, "examples": count, "value": value}
        table.append(row)
        clients[str(at)] = {
            "own-auroc": value,
            "own-loss": 1,
            "own-num-examples": count,
        }
    mean = np.nanmean(values) if any(value is not None for value in known) else None
    for name in ("summary.json", "metrics.jsonl"):
        content = json.loads((folder / name).read_text())
        for part in (content, content.get("final", {})):
            part["personal-own-auroc"] = mean
        content |= {"sites": table} if name == "summary.json" else {"clients": clients}
        content.pop("best", None)
        (folder / name).write_text(json.dumps(content) + "\n")


def claims_of(
    seed: int, template: Path, out: Path, patch: pytest.MonkeyPatch
) -> list[bool]:
    """Write the pages of a study, and return their established differences."""
    draw = np.random.default_rng(seed)
    tests = dict(zip(RUNS, drawn(draw), strict=True))
    numbered = {
        name: [
            replace(one, client=at, num_examples=len(one.targets))
            for at, one in enumerate(own)
        ]
        for name, own in tests.items()
    }
    patch.setattr(sites, "_tests", lambda folder, again: numbered[folder.name])
    for name in RUNS[:3]:
        written(template, out / name, tests[name])
    text = html.unescape(write_report(out / "a").read_text())
    (by_site,) = re.findall(r'aria-label="All metrics by site".*?</table>', text, re.S)
    for row in re.findall(r'<tr><th scope="row">.*?</tr>', by_site, re.S):
        for cell in re.findall(r"<td>(.*?)</td>", row)[: 1 + by_site.count(">against")]:
            # A number has its interval, or the reason why it has none.
            assert re.fullmatch(
                r"-( .*)?|[+-]?[\d.]+ \((\S+ to \S+|no interval: .+)\)", cell
            )
            ends = re.findall(r"\((\S+) to (\S+)\)", cell)
            assert all(float(low) < float(high) for low, high in ends)
    tiles = re.findall(r'<div class="tile">.*?</div>', text, re.S)
    compared = [tile for tile in tiles if "Compared with" in tile]
    for tile in compared:
        assert "not known" in tile or "95 % interval" in tile
    claims = [bool(re.search(r"is better (here|than .* here), by", text))]

    return claims


def check(count: int, template: Path, out: Path, patch: pytest.MonkeyPatch) -> None:
    found = [claims_of(at, template, out / str(at), patch) for at in range(count)]
    (page,) = np.sum(found, axis=0)
    assert page <= max(1, 0.05 * count)


def test_pages_of_a_few_studies_claim_little(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_tests, "_RESAMPLES", 25)
    check(5, template, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_pages_of_200_studies_claim_little(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_tests, "_RESAMPLES", 50)
    check(200, template, tmp_path, monkeypatch)
