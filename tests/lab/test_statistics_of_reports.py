"""The numbers of a page equal the numbers of numpy and scipy.

Values are drawn. If the sign is -1, all values are negated, and lower is better.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedbn_flwr.lab import answer, report
from fedbn_flwr.lab import report_pictures as pictures
from fedbn_flwr.lab.answer import facts_of, interval_text, next_step, odd_site
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.references import compare, half_of
from fedbn_flwr.lab.run_files import RunFiles

METRIC, KEYS = "test-accuracy", ("site", "low", "high", "value")
CONFIG = Config.make({"strategy": "standalone"})


def run_of(curve: Any, seed: int = 0) -> RunFiles:
    """Return a finished run with these values by round."""
    lines = [{"round": at, METRIC: value} for at, value in enumerate(curve, 1)]
    lines = [line | {"seconds": 1, "participants": []} for line in lines]
    ledger = {"bytes-down": 2**20, "bytes-up": 2**21}
    summary = {"headline": METRIC, "final": lines[-1], "ledger": ledger, "rounds": 20}
    config = CONFIG.model_copy(update={"seed": seed})
    return RunFiles(Path("run"), config, lines, summary, "", False)


def rows_of(values: Any, spread: Any, groups: Any = 10**6) -> list[dict[str, Any]]:
    """Return rows of sites with a constant difference from another run's rows."""
    frame = pd.DataFrame({"value": values, "spread": spread, "groups": groups})
    frame["difference"], frame["difference-spread"] = frame["value"], frame["spread"]
    half = 1.96 * frame["spread"]
    frame["low"], frame["high"] = frame["value"] - half, frame["value"] + half
    frame["examples"] = frame["groups"]
    return frame.assign(site=frame.index.astype(str)).to_dict("records")


@pytest.mark.parametrize("seed", range(8))
def test_half_of_an_interval_is_that_of_welch_and_student(seed: int) -> None:
    """Scipy has the cases of two samples, and of one."""
    draw = np.random.default_rng(seed)
    one, two = draw.normal(size=3 + seed), 5 * draw.normal(size=9)
    found = half_of([stats.sem(one), stats.sem(two)], [len(one), len(two)])
    welch = stats.ttest_ind(one, two, equal_var=False).confidence_interval()
    assert found == pytest.approx(np.ptp(welch) / 2)
    level = 1 - 0.05 / (1 + seed)
    student = stats.ttest_1samp(one, 0).confidence_interval(level)
    found = half_of([stats.sem(one)], [len(one)], of=1 + seed)
    assert found == pytest.approx(np.ptp(student) / 2)
    # Seeds without a spread over the examples are Student's as well.
    assert half_of([0], [2], one, 1 + seed) == pytest.approx(found)
    assert half_of([1], [9], [0.1, 0.1, 0.1]) is None


@pytest.mark.parametrize("seed", range(4))
def test_intervals_over_sites_are_those_of_simulated_sites(seed: int) -> None:
    draw, sites = np.random.default_rng(seed), 3 + seed
    values, deviations = draw.normal(size=sites), draw.random(sites)
    rows = rows_of(values, deviations)
    noise = draw.normal(0, deviations, (50_000, sites))
    run = run_of([0.5])
    found: Any = compare(run, run, rows)
    low, high = np.percentile(noise.mean(1), [2.5, 97.5])
    assert found.mean.value == pytest.approx(values.mean())
    assert found.mean.half == pytest.approx((high - low) / 2, rel=0.03)

    # One of the sites is compared with the mean of the others, at Bonferroni's level.
    others = (np.ones((sites, sites)) - np.eye(sites)) / (sites - 1)
    gaps = values - others @ values
    halves = (noise - noise @ others).std(0) * stats.norm.ppf(1 - 0.025 / sites)
    at = np.argmax(abs(gaps) - halves)
    odd = odd_site(rows)
    assert (odd["site"], odd["value"] - odd["mean"]) == (
        str(at),
        pytest.approx(gaps[at]),
    )
    assert odd["half"] == pytest.approx(halves[at], rel=0.03)
    assert odd["excess"] == pytest.approx(abs(gaps[at]) - odd["half"])

    # A reference with other settings of the training is named with them.
    assert found.differs == ""
    other = replace(run, config=CONFIG.model_copy(update={"learning_rate": 0.7}))
    assert compare(run, other, rows).differs == "learning-rate=0.7"
    named = facts_of(run, rows, [compare(run, other, rows)])
    assert named[-2].more.endswith("; there, other settings: learning-rate=0.7")

    # n equal sites have a half width of w / sqrt n, and two are too few.
    alike = rows_of(np.ones(sites), 0.5)
    found = compare(run, run, alike)
    assert found.mean.half == pytest.approx(0.98 / sites**0.5, rel=1e-3)
    assert odd_site([*alike[:2], alike[2] | {"spread": None}]) == {}


@pytest.mark.parametrize("seed", range(8))
def test_one_site_never_removes_the_answer_for_all(seed: int) -> None:
    """The site is named, and the others have their interval without it."""
    draw, run = np.random.default_rng(seed), run_of([0.5])
    rows = rows_of(draw.normal(size=6), draw.random(6), draw.integers(2, 400, 6))
    lost = draw.permutation(6)[: 1 + seed % 5]
    for at in lost:
        rows[at] |= {"difference-spread": None, "difference-why": f"why {at}"}
    found: Any = compare(run, run, rows)
    rest = [row for at, row in enumerate(rows) if at not in lost]
    alone: Any = compare(run, run, rest)
    assert (found.mean.value, found.mean.half) == (alone.mean.value, alone.mean.half)
    assert found.mean.left_out == {str(at): f"why {at}" for at in sorted(lost)}
    for sign in ("+", ""):
        text = interval_text(found.mean, METRIC, sign)
        assert all(f"{at} (why {at})" in text for at in lost)
        mean = answer.shown(found.mean.value, METRIC)  # not of all, as before the text
        assert (f": {mean}, 95 %" in text) == (not sign)
    # Without any interval, the mean has the reason of the first.
    for row in rest:
        row |= {"difference-spread": None, "difference-why": "why"}
    none: Any = compare(run, run, rows)
    assert none.mean.half is None
    assert none.too_few == rows[0]["difference-why"]
    # More than twenty sites without intervals of their own are a sample of sites.
    many = [row | {"site": f"{row['site']} {at}"} for at in range(4) for row in rows]
    found = compare(run, run, many)
    values = [row["difference"] for row in many]
    ends = stats.ttest_1samp(values, 0).confidence_interval()
    assert found.mean.half == pytest.approx(np.ptp(ends) / 2)


@pytest.mark.parametrize("seed", range(6))
def test_the_facts_of_a_run_name_its_best_and_its_worst(seed: int, sign: int) -> None:
    draw = np.random.default_rng(seed)
    curve = 3 + draw.random(20).round(3)
    curve[16:] += 0.02 * seed
    run = run_of(sign * curve)
    values = draw.normal((0.3, -0.3, 0)[seed % 3], 0.4, 9)
    rows = rows_of(sign * values, draw.random(9) / 4)
    found: Any = compare(run, run, rows)
    result, worst, other, cost = facts_of(run, rows, [found])
    best = f"the best test, {100 * sign * curve.max():.1f} after round"
    assert result.value == f"{100 * sign * curve[-1]:.1f} %"
    assert (f"{best} {1 + curve.argmax()}" in result.more) == (curve.argmax() < 19)
    site, low, high, value = (rows[values.argmin()][key] for key in KEYS)
    assert worst.value == f"{100 * value:.1f} %"
    assert worst.more == f"{site}, 95 % interval {100 * low:.1f} to {100 * high:.1f}"
    about = "sent and received, a broadcast counted once; 20.0 s"
    assert (cost.value, cost.more) == ("3.00 MiB", about)

    # A site and the mean are clearly better if their whole intervals are.
    tone = ("", "good", "bad")[int(found.established * np.sign(values.mean()))]
    mean = found.mean
    assert found.established == (abs(values.mean()) > mean.half)
    assert (other.value, other.tone) == (f"{100 * mean.value:+.1f} points", tone)
    ends = np.clip([mean.value - mean.half, mean.value + mean.half], -1, 1)
    assert "95 % interval {:+.1f} to {:+.1f}".format(*(100 * ends)) in other.more
    half = stats.norm.ppf(1 - 0.025 / 9) * np.array([row["spread"] for row in rows])
    for side, sites in (("better", values > half), ("worse", -values > half)):
        names = ", ".join(np.flatnonzero(sites).astype(str))
        few = f" ({names})" if 0 < sites.sum() < 4 else ""
        assert f"clearly {side} at {sites.sum()}{few}" in other.more

    # A page gives no number for a few examples.
    few: Any = compare(run, run, rows_of(values, 0.1, 3))
    *_, hidden, _ = facts_of(run, rows, [few])
    assert (few.established, hidden.value) == (False, "not known")
    assert hidden.more == "only 27 test examples; 30 are needed"

    # A remedy whose result is on the page is not the next step.
    for setting, named in (("strategy=standalone", False), ("norm=group", True)):
        remedy = {"setting": setting, "why": "why"}
        findings = [{"what": "A fault.", "remedies": [remedy]}]
        step = next_step(run, [found], findings)
        assert step.more.startswith("A fault. Use norm") == named

    # More rounds help if the last test is better than the first four fifths.
    step: Any = next_step(run, [found], [])
    expected = f"Look at {site}, " if tone == "bad" else "Repeat the run"
    if curve[-1] - curve[:16].max() > 0.05 * np.ptp(curve):
        expected = "The test accuracy still improves."
    assert step.more.startswith(expected)


@pytest.mark.parametrize("seed", range(4))
def test_the_page_of_a_study_has_the_intervals_of_scipy(
    seed: int, sign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of one method is missing."""
    drawn: list[Any] = []
    for kind in ("rows", "curves"):
        monkeypatch.setattr(
            pictures, kind, lambda *args, **kw: drawn.append((args, kw))
        )
    finals = pd.DataFrame(sign * np.random.default_rng(seed).random((4, 4)))
    finals.loc[seed, 3] = np.nan
    runs = {
        name: [run_of([0.1, value], at) for at, value in of.dropna().items()]
        for name, of in finals.rename(columns=str).items()
    }
    table = report._finals(runs)
    found = report._verdict(table, METRIC, ["1"])
    [*report._study_pictures(runs, table, METRIC, "", {}, Path("page"))]
    order = sorted(runs, key=lambda name: -sign * finals[int(name)].mean())
    best = finals[int(order[0])]
    assert (found["best"], found["mean"]) == (order[0], pytest.approx(best.mean()))
    assert found["gaps"].keys() == {order[1], "1"} - {order[0]}
    for name, (mean, half, seeds) in found["gaps"].items():
        gap = (best - finals[int(name)]).dropna()
        # The best of four methods is the best of six pairs (Bonferroni).
        low, high = stats.ttest_1samp(gap, 0).confidence_interval(1 - 0.05 / 6)
        assert (mean - half, mean + half, seeds) == pytest.approx((low, high, len(gap)))
    ((points, *_), _), ((curves, *_), options) = drawn
    for name in runs:
        values = finals[int(name)].dropna()
        ends = stats.ttest_1samp(values, 0).confidence_interval()
        expected = np.clip([values.mean(), *ends], 0, 1)
        assert [*points.loc[name]] == pytest.approx([*expected])
    assert [*curves] == order[:3]
    assert options["file"] == Path("page-rounds")
    for name, (low, high) in options["bands"].items():
        values = finals[int(name)]
        assert [*curves[name]] == pytest.approx([0.1, values.mean()])
        assert (low[2], high[2]) == (values.min(), values.max())
