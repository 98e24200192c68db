"""The numbers of an advice are those of scipy and pandas, whichever score is better.

Scores, tests, costs and sites are drawn, and no run is done.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal
from scipy import stats

from fedbn_flwr.lab.advice import halving, verdict
from fedbn_flwr.lab.advice.candidates import ALONE, FEDAVG, Candidate
from fedbn_flwr.lab.advice.halving import LOOK, SEEDS, Point, Rung, cost
from fedbn_flwr.lab.advice.verdict import dropped_by_chance
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.run_files import RunFiles
from fedbn_flwr.lab.studies.study import Cell, Study
from fedbn_flwr.training import tasks

OUT, ROUNDS, METRIC = Path("out"), 96, "personal-validation-accuracy"
REFERENCES = {FEDAVG, ALONE}
POINTS = [
    Point(Candidate(name, {}, "", METRIC), rate)
    for name in (FEDAVG, ALONE, "C", "D")
    for rate in (0.1, 0.3, 0.9)
]
CONFIG = Config()
SIDES = {2: "better", -2: "worse", 0: "not clearly different", math.nan: "not known"}
FIGURES = ["score", "test", "bytes", "exchanges", "seconds"]
ENDS = ["difference", "difference-low", "difference-high"]


class Drawn:
    """A drawn advice. If ``sign`` is -1, all scores are negated, and lower is better.

    Attributes:
        spent: the rounds of all runs.
        rungs: the trials.
        methods: the methods of the final runs.
        runs: a row for each final run that is done, by method and seed.
        rows: the sites' rows with each seed.
        advice: the advice.
    """

    def __init__(self, patch: pytest.MonkeyPatch, seed: int, sign: int) -> None:
        self.draw, self.sign, self.spent = np.random.default_rng(seed), sign, LOOK
        self.digits = int(self.draw.integers(4))
        self.rows: list[dict[str, Any]] = []
        patch.setattr(tasks, "_LOWER_IS_BETTER", ("accuracy",) if sign < 0 else ())
        patch.setattr(Cell, "folder", lambda cell, out: Path(cell.name))
        patch.setattr(halving, "is_done", lambda cell, out: True)
        patch.setattr(halving, "score_of", lambda cell, out: self.trial(cell))
        self.rungs, _ = halving.halve(POINTS, {}, ROUNDS, ROUNDS, 0, OUT, lambda _: _)
        last = halving.finalists(self.rungs[-1], METRIC)
        self.methods: Any = {point.candidate.name: {} for point in last}
        study = Study(name="advice", methods=self.methods, seeds=[*range(SEEDS)])
        runs = {cell.name: self.run(cell) for cell in study.cells()}
        patch.setattr(verdict, "is_done", lambda cell, out: runs[cell.name]["done"])
        patch.setattr(verdict, "score_of", lambda cell, out: runs[cell.name]["score"])
        patch.setattr(verdict, "site_rows", self.site_rows)
        patch.setattr(RunFiles, "read", lambda folder: files_of(folder, runs))
        self.advice = verdict.verdict(study, last, METRIC, OUT)
        self.runs = pd.DataFrame(run for run in runs.values() if run["done"])

    def score(self, undefined: bool, lower: bool = False) -> float | None:
        value = self.sign * (round(self.draw.random(), self.digits) - lower)
        return None if self.draw.random() < 0.05 * undefined else value

    def trial(self, cell: Cell) -> float | None:
        self.spent += int(cell.base["num-server-rounds"])
        # If the references are worse than all others, the trials cost most.
        worse = self.digits > 1 and cell.method in REFERENCES
        return self.score(cell.method != FEDAVG, worse)

    def run(self, cell: Cell) -> dict[str, Any]:
        self.spent += ROUNDS
        optional = cell.method != FEDAVG
        score, test = self.score(optional), self.score(True)
        if not self.digits:
            # The methods differ by the same with every seed.
            score = self.sign * (cell.seed + len(cell.method) / 8)
        row = {"method": cell.method, "seed": cell.seed, "score": score, "test": test}
        row |= dict(zip(FIGURES[2:], self.draw.integers(2, size=3), strict=True))
        return row | {"done": self.draw.random() > 0.05 * optional}

    def site_rows(self, run: RunFiles, other: RunFiles | None) -> Any:
        method, *rest = run.folder.parts
        assert other is None or other.folder == Path(ALONE, *rest)
        rows = []
        for site in ("north", "south", "west"):
            ends = np.sort(self.sign * (self.draw.random(3) - 0.2))[[1, 0, 2]]
            if other is None or self.draw.random() < 0.05:
                ends[:] = np.nan
            row = dict(zip(ENDS, ends, strict=True))
            rows.append({"site": site, "method": method, **row})
        self.rows += rows
        return rows, ""


def files_of(folder: Path, runs: dict[str, Any]) -> RunFiles:
    """Return the folder of a run as two lines and a summary."""
    run = runs[str(folder)]
    ledger = {"bytes-up": run["bytes"], "bytes-down": 1, "exchanges": run["exchanges"]}
    summary = {"headline": METRIC, "final": {METRIC: run["test"]}, "ledger": ledger}
    lines = [{"seconds": run["seconds"]}, {"seconds": 1}]
    config = CONFIG.model_copy(update={"seed": run["seed"]})
    return RunFiles(folder, config, lines, summary, "", False)


def mean(values: pd.Series) -> float:
    """Return the mean, NaN if a value is unknown."""
    return values.astype(float).mean(skipna=False)


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("sign", [1, -1])
def test_an_advice_has_the_numbers_of_scipy(seed: int, sign: int, monkeypatch) -> None:
    drawn = Drawn(monkeypatch, seed, sign)
    advice, text = drawn.advice, " ".join(drawn.advice["answer"])

    # The better half of the trials continues, with the best rates of the references.
    assert drawn.spent <= cost(ROUNDS, len(POINTS))
    for rung, after in itertools.pairwise(drawn.rungs):
        known = [score for score in rung.scores.values() if score is not None]
        assert known == sorted(known, reverse=sign > 0)
        better = rung.comparable(METRIC)[: math.ceil(len(rung.scores) / 2)]
        kept = {*better, *map(rung.best_of, REFERENCES)} - {None}
        assert after.scores.keys() == kept
    names = [p.candidate.name for p in drawn.rungs[-1].comparable(METRIC)]
    federated = [*dict.fromkeys(name for name in names if name != ALONE)]
    assert drawn.methods.keys() == {*federated[:2], *REFERENCES} & {*names}

    # The ranking has the methods with a score for each seed.
    ranking = pd.DataFrame(advice["ranking"], dtype=object).set_index("method")
    scores = drawn.runs.pivot(index="seed", columns="method", values="score")
    scores = scores.astype(float).dropna(axis="columns")
    assert [*ranking.score] == sorted(scores.mean(), reverse=sign > 0)
    means = drawn.runs.groupby("method")[FIGURES].agg(mean).loc[ranking.index]
    means += [0, 0, 1, 0, 1]  # bytes down, and the second of another round
    assert_frame_equal(ranking[FIGURES].astype(float), means, check_index_type=False)
    assert {*ranking.index} == {*scores.columns}
    first, *others = ranking.index
    for name in others:
        row, gap = ranking.loc[name], scores[first] - scores[name]
        ends = stats.ttest_1samp(gap, 0).confidence_interval(0.95)
        said = "with every seed"
        if np.ptp(gap) > 1e-9:
            assert row.half == pytest.approx(np.ptp(ends) / 2)
            said = "95 % interval {:+.1f} to {:+.1f}".format(*(100 * np.array(ends)))
        assert row.difference == pytest.approx(gap.mean())
        said = f"{name} ({100 * gap.mean():+.1f}, {said})"
        (sentence,) = (one for one in advice["answer"] if said in one)
        established = np.ptp(gap) > 1e-9 and ends.low * ends.high > 0
        assert sentence.startswith("It is better than") == established
        cheaper = row.exchanges < ranking.exchanges[first] and not established
        assert (f"{name} {row.exchanges:g}" in text) == cheaper

    # A site is better with the best federated method if its whole interval is.
    if advice["sites"]:
        rows = pd.DataFrame(drawn.rows)
        best = next(name for name in ranking.index if name != ALONE)
        assert {*rows.method} == {best} == {advice["federated"]}
        means = rows.groupby("site", sort=False)[ENDS].agg(mean)
        found = pd.DataFrame(advice["sites"]).set_index("site").astype(float)
        assert_frame_equal(found, means, check_index_type=False)
        sides = np.sign(sign * means[ENDS[1:]]).sum(axis="columns", skipna=False)
        sides = sides.map(SIDES)
        for side, sites in sides.groupby(sides).groups.items():
            assert f"{side} at {len(sites)} ({', '.join(sites)})" in text


@pytest.mark.parametrize("late", [False, True], ids=["a trial", "the ranking"])
def test_chance_drops_a_method_within_two_standard_errors(late: bool) -> None:
    """The error is that of the difference of two simulated shares of right answers.

    A reference continues with any score, so it is not the least score that continued.
    """
    draw = np.random.default_rng(0)
    for errors in np.tile([1.9, 2.1], 20):
        share, count = draw.uniform(0.3, 0.95), int(draw.integers(50, 2000))
        error = np.diff(draw.binomial(count, share, (2, 20_000)) / count, axis=0).std()
        scores = {"A": 0.97, "B": share, FEDAVG: 0.1, "C": share - errors * error}
        points = [Point(Candidate(name, {}, "", METRIC), 0.1) for name in scores]
        by_point = dict(zip(points, scores.values(), strict=True))
        left = {point: by_point[point] for point in points[: 3 + late]}
        advice = {"metric": METRIC, "ranking": [{"method": name} for name in "AB"]}
        text = dropped_by_chance([Rung(4, by_point), Rung(8, left)], advice, count)
        assert ("dropped C:" in text) == (errors < 2)
        assert not text or f"within {200 * error:.0f} points" in text
