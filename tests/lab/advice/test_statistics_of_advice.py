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

from fedbn_flwr.lab.advice import candidates, halving, verdict
from fedbn_flwr.lab.advice.candidates import ALONE, FEDAVG, Candidate
from fedbn_flwr.lab.advice.halving import LOOK, SEEDS, Point, Rung, cost
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.run_files import RunFiles
from fedbn_flwr.lab.studies.study import Cell, Study
from fedbn_flwr.strategies import STRATEGIES

OUT, ROUNDS, METRIC = Path("out"), 96, "personal-validation-accuracy"
OWN = "personal-own-accuracy"
POINTS = [
    Point(Candidate(name, {}, "", METRIC), rate)
    for name in (FEDAVG, ALONE, "C", "D")
    for rate in (0.1, 0.3, 0.9)
]
COSTS = ["bytes-down", "bytes-up", "exchanges", "seconds"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_method_that_was_asked_for_has_the_test_of_all_methods(name: str) -> None:
    """A page may recommend another test for another situation."""
    if name != "centralized":
        settings = candidates._asked(name).settings
        assert settings["strategy"] == name
        assert "eval-on" not in settings


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
    # The runs cost at most the promised number, and once as much.
    left = cost(ROUNDS, len(POINTS)) - sum(spent) - ROUNDS * SEEDS * len(last)
    assert left == 0 if seed == 7 else left >= 0


NAMES = [FEDAVG, ALONE, "C", "D"]
SOUND = NAMES[2]


class Drawn:
    """Final runs of four methods with three seeds, at up to six sites.

    The validation scores and the tests are drawn. The difference of two methods at a
    site has a standard error, or a reason why it has none.
    """

    def __init__(self, seed: int, sign: int, patch: pytest.MonkeyPatch) -> None:
        draw = np.random.default_rng(seed)
        methods = {name: {"learning-rate": 0.1} for name in NAMES}
        self.study = Study(name="", methods=methods, seeds=[0, 1, 2])
        self.scores = pd.DataFrame(sign * draw.random((3, 4)), columns=NAMES)
        self.sites = int(draw.integers(1, 7))
        # (seed, method, site): in some draws, a method is far better.
        shift = draw.choice([0, 3]) * np.array([0, -1, 1, 0])[:, None]
        self.values = shift + draw.normal(0, 0.3, (3, 4, self.sites))
        self.spreads = draw.random(self.sites)
        self.known = draw.random(self.sites) < 0.8
        self.groups = draw.integers(2, 400, self.sites)
        self.costs = draw.integers(3, size=(3, 4, 4))
        self.odd, self.others = seed % 3 == 0, -0.5 * (seed % 3 == 1)
        self.missing = {(ALONE, 0)} if seed % 4 == 0 else set()
        patch.setattr(Cell, "folder", lambda cell, out: cell)
        patch.setattr(RunFiles, "read", self.read)
        patch.setattr(verdict, "site_rows", self.rows)
        patch.setattr(verdict, "score_of", lambda c, out: self.scores[c.method][c.seed])
        there = lambda c, out: (c.method, c.seed) not in self.missing  # noqa: E731
        patch.setattr(verdict, "is_done", there)

    def read(self, cell: Cell) -> RunFiles:
        at = NAMES.index(cell.method)
        ledger = dict(zip(COSTS, self.costs[cell.seed, at].tolist(), strict=True))
        final = {OWN: float(self.values[cell.seed, at].mean())}
        summary = {"headline": OWN, "final": final, "ledger": ledger}
        config = Config(seed=cell.seed)
        return RunFiles(Path(cell.method), config, [ledger] * 2, summary, "", False)

    def rows(self, run: RunFiles, reference: RunFiles | None = None) -> Any:
        other = reference or run
        assert run.config == other.config
        of = self.values[run.config.seed]
        one, two = (NAMES.index(each.folder.name) for each in (run, other))
        rows = []
        for site in range(self.sites):
            row = {"site": f"s{site}", "examples": 50, "groups": self.groups[site]}
            row |= {"value": of[one, site], "other": of[two, site]}
            row["difference"] = of[one, site] - of[two, site]
            why = {"difference-why": "one class"}
            if self.known[site]:
                why = {"difference-spread": self.spreads[site]}
            # In some draws, the models of all methods but one call too many positive
            # at the first site. In others, they are right only there.
            odd = self.odd and NAMES[one] != SOUND
            excess = 0.6 * odd if site == 0 else self.others
            row |= {"yes-value": 0.2, "called-value": 0.2 + excess}
            row |= {"excess-value": excess, "excess-spread": 1e-9}
            row |= {"yes-spread": 1, "called-spread": 1}
            rows.append(row | why)
        return rows, ""

    def half(self, one: str, two: str, of: int) -> tuple[Any, float | None]:
        """The mean difference and half of its interval, by Welch and Satterthwaite."""
        at = [s for s in range(3) if not {(one, s), (two, s)} & self.missing]
        gaps = self.values[at, NAMES.index(one)] - self.values[at, NAMES.index(two)]
        if not self.known.any():
            return gaps.mean(), None
        by_seed, n = gaps[:, self.known].mean(1), self.known.sum()
        parts = [*(self.spreads[self.known] / n) ** 2, by_seed.var(ddof=1) / len(at)]
        df = np.array([*self.groups[self.known], len(at)]) - 1
        freedom = sum(parts) ** 2 / (np.square(parts) / df).sum()
        half = stats.t.ppf(1 - 0.025 / of, freedom) * sum(parts) ** 0.5
        return by_seed.mean(), half


@pytest.mark.parametrize("seed", range(12))
def test_a_ranking_has_the_numbers_of_the_test_examples(
    sign: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation scores give the order, and test examples give each statement."""
    drawn = Drawn(seed, sign, monkeypatch)
    advice = verdict.verdict(drawn.study, POINTS, METRIC, OUT)
    # The methods with a score for each seed are ranked.
    scores = drawn.scores.drop(columns=[name for name, _ in drawn.missing])
    first, *others = sorted(scores, key=lambda name: -sign * scores[name].mean())
    ranking, (use, _, *text) = advice["ranking"], advice["answer"]
    assert [row["method"] for row in ranking] == [first, *others]
    assert use.startswith("Train each" if first == ALONE else f"Use {first} with")
    federated = others[0] if first == ALONE else first
    pairs = [*((first, other) for other in others), (federated, ALONE)]
    count = len({*map(frozenset, pairs)})
    for row in ranking:
        name = row["method"]
        at = NAMES.index(name)
        down, up, exchanges, seconds = drawn.costs[:, at].mean(0)
        expected = {"score": scores[name].mean(), "bytes": down + up}
        expected |= {"exchanges": exchanges, "seconds": 2 * seconds}
        expected["test"] = drawn.values[:, at].mean()
        if name != first:
            gap, half = drawn.half(first, name, count)
            expected |= {"difference": gap, "half": half}
            few = 50 * (drawn.known.sum() or drawn.sites) < 30
            established = half is not None and abs(gap) > half and not few
            assert row["established"] == established
            kind = "No difference from"
            if established:
                kind = "It is better" if sign * gap > 0 else "But on the test"
            (said,) = (one for one in text if f"{name} ({row['text']})" in one)
            assert said.startswith(kind)
            ours = [*drawn.costs[:, NAMES.index(first)].mean(0)]
            costs, best = (down + up, exchanges), (ours[0] + ours[1], ours[2])
            less = (
                all(a <= b for a, b in zip(costs, best, strict=True)) and costs != best
            )
            unsure = any("it is worse than" in one for one in text)
            cheaper = less and not kind.startswith("It is") and not unsure
            named = [one for one in text if "take a cheaper method" in one]
            assert (
                any(f"{name} with" in one.replace(",", "") for one in named) == cheaper
            )
        assert {key: row[key] for key in expected} == pytest.approx(expected)

    # A site is different only among at least three.
    said = "At s0, its models call 80.0 % of the 50 test examples positive, but 20.0 %"
    warned = [one for one in text if "its models call" in one]
    assert all(one.startswith(said) for one in warned)
    assert len(warned) == (drawn.odd and drawn.sites > 2 and first != SOUND)

    # For the sites, the answer compares with local training, by the same rule.
    alone = advice["alone"]
    gap, half = drawn.half(federated, ALONE, count)
    assert (alone["difference"], alone["half"]) == pytest.approx((gap, half))
    assert len(alone["sites"]) == drawn.sites
    both = [NAMES.index(name) for name in (federated, ALONE)]
    at = [seed for seed in range(3) if (ALONE, seed) not in drawn.missing]
    means = drawn.values[at][:, both].mean(0).T
    for row, of_site in zip(alone["sites"], means, strict=True):
        assert (row["value"], row["other"]) == pytest.approx(tuple(of_site))
        side = "not known"
        if row["difference-low"] is not None:
            low, high = sign * row["difference-low"], sign * row["difference-high"]
            side = "not clearly different"
            if low * high > 0:
                side = "better" if low > 0 else "worse"
        words = " ".join(text)
        few = rf"{side} at \d \([s\d, ]*{row['site']}"
        assert re.search(few, words) or re.search(rf"{side} at [5-9]", words)


@pytest.mark.parametrize("seed", range(6))
def test_no_statement_on_benefit_reads_validation_examples(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice does not change with validation results that change after the choice."""
    drawn = Drawn(seed, 1, monkeypatch)
    before = verdict.verdict(drawn.study, POINTS, METRIC, OUT)
    chosen = {row["method"]: row["score"] for row in before["ranking"]}
    drawn.scores = drawn.scores.sample(frac=1, axis="columns", random_state=seed) * 0.1
    assert verdict.benefit(drawn.study, chosen, METRIC, OUT) == before


@pytest.mark.parametrize("late", [False, True], ids=["a trial", "the ranking"])
def test_chance_drops_a_method_within_two_standard_errors(late: bool) -> None:
    """It is the error of the difference of two simulated shares of right answers.

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
        found = verdict.dropped_by_chance(rungs, advice, count)
        assert [*found] == [ALONE] * int(errors < 2)
        assert found.get(ALONE, 2 * error) == pytest.approx(2 * error, rel=0.05)
