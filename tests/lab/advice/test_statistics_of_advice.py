"""The numbers of an advice equal the numbers of scipy.

Scores, costs and sites are drawn. If the sign is -1, all scores are negated, and lower
is better.
"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedbn_flwr.lab.advice import halving, verdict
from fedbn_flwr.lab.advice.candidates import ALONE, FEDAVG, Candidate
from fedbn_flwr.lab.advice.halving import LOOK, SEEDS, Point, Rung, cost
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.run_files import RunFiles
from fedbn_flwr.lab.studies.study import Cell, Study

OUT, ROUNDS, METRIC = Path("out"), 96, "personal-validation-accuracy"
POINTS = [
    Point(Candidate(name, {}, "", METRIC), rate)
    for name in (FEDAVG, ALONE, "C", "D")
    for rate in (0.1, 0.3, 0.9)
]
COSTS = ["bytes-down", "bytes-up", "exchanges", "seconds"]
ENDS = ["difference", "difference-low", "difference-high"]


@pytest.mark.parametrize("seed", range(8))
def test_the_better_half_of_the_trials_continues(
    sign: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best rates of the references continue as well."""
    draw, spent = np.random.default_rng(seed), [LOOK]

    def score(cell: Cell, out: Path) -> float | None:
        spent.append(int(cell.base["num-server-rounds"]))
        # In half of the cases, the references are worse than all others.
        worse = seed % 2 and cell.method in (FEDAVG, ALONE)
        return None if draw.random() < 0.05 else sign * (draw.random() - worse)

    monkeypatch.setattr(halving, "is_done", lambda cell, out: True)
    monkeypatch.setattr(halving, "score_of", score)
    rungs, _ = halving.halve(POINTS, {}, ROUNDS, ROUNDS, 0, OUT, len)
    for rung, after in itertools.pairwise(rungs):
        known = rung.comparable(METRIC)
        assert [*rung.scores][: len(known)] == known
        values = [rung.scores[point] for point in known]
        assert values == sorted(values, reverse=sign > 0)
        better = known[: math.ceil(len(rung.scores) / 2)]
        kept = {*better, rung.best_of(FEDAVG), rung.best_of(ALONE)}
        assert after.scores.keys() == kept - {None}
    last = [point.candidate.name for point in halving.finalists(rungs[-1], METRIC)]
    names = dict.fromkeys(p.candidate.name for p in rungs[-1].comparable(METRIC))
    best = [name for name in names if name != ALONE][:2]
    assert {*last} == {*best, FEDAVG, ALONE} & {*names}
    # The runs cost what was promised at most, and once as much.
    left = cost(ROUNDS, len(POINTS)) - sum(spent) - ROUNDS * SEEDS * len(last)
    assert left == 0 if seed == 7 else left >= 0


@pytest.mark.parametrize("seed", range(6))
def test_a_ranking_has_the_numbers_of_scipy(
    sign: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, names = np.random.default_rng(seed), [FEDAVG, ALONE, "C", "D"]
    study = Study(name="", methods={name: {} for name in names}, seeds=[0, 1, 2])
    # In the fifth case, the methods differ by the same with every seed.
    noise = draw.random((3, 4)) * (1, 0.1, 1, 0.1, 0, 0.1)[seed]
    scores = pd.DataFrame(sign * (np.arange(4) / 4 + noise), columns=names)
    tests = scores + 1
    if seed == 5:
        scores.loc[1, "D"], tests.loc[1, "C"] = math.nan, math.nan
    costs = draw.integers(3, size=(3, 4, 4))
    # The sites are better, undecided and worse.
    ends = draw.random((3, 3, 3)) + np.array([[0.2], [-0.5], [-1.2]])
    ends = np.sort(sign * ends)[..., [1, 0, 2]]
    used = set()

    def read(cell: Cell) -> RunFiles:
        ledger = dict(
            zip(COSTS, costs[cell.seed, names.index(cell.method)], strict=True)
        )
        test = tests[cell.method][cell.seed]
        summary = {"headline": METRIC, "final": {METRIC: test}, "ledger": ledger}
        config = Config(seed=cell.seed)
        return RunFiles(Path(cell.method), config, [ledger] * 2, summary, "", False)

    def site_rows(run: RunFiles, other: RunFiles | None) -> Any:
        used.add(run.folder.name)
        assert other is None or (other.folder.name, other.config) == (ALONE, run.config)
        known = ends[run.config.seed] if other else [[math.nan] * 3] * 3
        rows = pd.DataFrame(known, columns=ENDS).assign(site=[*"xyz"])
        return rows.to_dict("records"), ""

    monkeypatch.setattr(Cell, "folder", lambda cell, out: cell)
    monkeypatch.setattr(RunFiles, "read", read)
    monkeypatch.setattr(verdict, "site_rows", site_rows)
    of = lambda cell, out: scores[cell.method][cell.seed]  # noqa: E731
    monkeypatch.setattr(verdict, "score_of", of)
    # In half of the cases, a run of training alone is missing.
    there = lambda cell, out: (cell.method, cell.seed) != (ALONE, seed)  # noqa: E731
    monkeypatch.setattr(verdict, "is_done", there)
    advice = verdict.verdict(study, POINTS, METRIC, OUT)
    ranking, text = advice["ranking"], " ".join(advice["answer"])

    # The methods with a score for each seed are ranked.
    scores = scores.drop(columns=ALONE if seed < 3 else []).dropna(axis="columns")
    first, *others = sorted(scores, key=lambda name: -sign * scores[name].mean())
    assert [row["method"] for row in ranking] == [first, *others]
    for row in ranking:
        name = row["method"]
        gap, of_tests = scores[first] - scores[name], tests[name]
        down, up, exchanges, seconds = costs[:, names.index(name)].mean(0)
        interval = stats.ttest_1samp(gap, 0).confidence_interval(0.95)
        known = np.ptp(gap) > 1e-9
        expected = {"score": scores[name].mean(), "bytes": down + up}
        expected |= {"exchanges": exchanges, "seconds": 2 * seconds}
        expected["test"] = None if of_tests.hasnans else of_tests.mean()
        expected["difference"] = None if name == first else gap.mean()
        expected["half"] = np.ptp(interval) / 2 if known else None
        assert {key: row[key] for key in expected} == pytest.approx(expected)
        if name == first:
            continue
        low, high = 100 * np.array(interval)
        spread = (
            f"95 % interval {low:+.1f} to {high:+.1f}" if known else "with every seed"
        )
        said = f"{name} ({100 * gap.mean():+.1f}, {spread})"
        (sentence,) = (one for one in advice["answer"] if said in one)
        established = known and low * high > 0
        assert sentence.startswith("It is better than") == established
        cheaper = exchanges < ranking[0]["exchanges"] and not established
        assert (f"{name} {exchanges:g}" in text) == cheaper

    # A site is better with the best federated method if its whole interval is.
    best = others[0] if first == ALONE else first
    assert used == {best} == {advice["federated"]}
    ends[[seed] * (seed < 3)] = math.nan
    found = pd.DataFrame(advice["sites"]).set_index("site").astype(float)
    assert found.to_numpy() == pytest.approx(ends.mean(0), nan_ok=True)
    for site, (_, low, high) in zip("xyz", sign * ends.mean(0), strict=True):
        side = "not known" if low != low else "not clearly different"
        if low * high > 0:
            side = "better" if low > 0 else "worse"
        assert re.search(rf"{side} at \d \([xyz, ]*{site}", text)


@pytest.mark.parametrize("late", [False, True], ids=["a trial", "the ranking"])
def test_chance_drops_a_method_within_two_standard_errors(late: bool) -> None:
    """The error is that of the difference of two simulated shares of right answers.

    A reference continues with any score, so it is not the least score that continued.
    """
    draw, points = np.random.default_rng(0), [POINTS[at] for at in (6, 9, 0, 3)]
    for errors in np.tile([1.9, 2.1], 20):
        share, count = draw.uniform(0.3, 0.95), int(draw.integers(50, 2000))
        error = np.diff(draw.binomial(count, share, (2, 20_000)) / count, axis=0).std()
        values = 0.97, share, 0.1, share - errors * error
        scores = dict(zip(points, values, strict=True))
        left = {point: scores[point] for point in points[: 3 + late]}
        advice = {"metric": METRIC, "ranking": [{"method": name} for name in "CD"]}
        rungs = [Rung(4, scores), Rung(8, left)]
        text = verdict.dropped_by_chance(rungs, advice, count)
        assert (f"dropped {ALONE}:" in text) == (errors < 2)
        assert not text or f"within {200 * error:.0f} points" in text
