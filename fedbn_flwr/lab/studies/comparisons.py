"""Paired comparisons of methods over seeds: mean difference, its confidence interval, and Holm's correction.

Runs of two methods with one seed have the same data split and the same initial weights, so their difference varies less
than either result. The interval is Student's: with differences d_1..d_n, mean(d) ± t(0.975, n - 1) s(d) / sqrt(n), s
the sample standard deviation. It needs two seeds, and three give a wide one.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedbn_flwr.lab.studies.numbers import table_line
from fedbn_flwr.training.tasks import in_percent, quantity_of

__all__ = ["DIFFERENT_TESTS", "FIELDS", "LEVEL", "comparisons", "comparisons_markdown", "difference", "left_out"]

LEVEL = 0.95
_EQUAL = 1e-9  # differences of shares of examples, equal as fractions, differ in float64's last digits
FIELDS = (
    *("split", "method", "metric", "other", "other-metric"),
    *("seeds", "difference", "low", "high", "p", "p-holm"),
)
DIFFERENT_TESTS = (
    "Two metrics in a row are different tests, the main one of each method: the difference is one of the methods and "
    "of the tests."
)

Row = Mapping[str, Any]


def difference(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean, confidence interval and two-sided p of paired differences (t test against 0).

    Equal differences, and a single one, have neither: their spread is not known. On a small test set a few seeds often
    differ by the same number of examples.
    """
    mean = statistics.fmean(values)
    if max(values) - min(values) <= _EQUAL * max(1.0, *map(abs, values)):
        return {"difference": mean, "low": None, "high": None, "p": None}
    from scipy.stats import t

    error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(t.ppf((1 + LEVEL) / 2, len(values) - 1)) * error
    p = 2 * float(t.sf(abs(mean) / error, len(values) - 1))
    return {"difference": mean, "low": mean - half, "high": mean + half, "p": p}


def comparisons(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a row for each pair of methods of a split, from the tidy rows of finished runs.

    The main metrics of two methods are compared if they measure the same quantity, also on different tests: FedBN's
    accuracy is that of the clients' models, FedAvg's that of the global one. Other metrics are compared by their name.

    The seeds are those that both methods finished. ``p-holm`` is corrected for all pairs of main metrics of the split,
    or for all pairs of another metric (Holm 1979): below 0.05, the difference is not explained by having looked at many
    pairs.
    """
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for family in _families(_results(rows)):
        values: dict[tuple[str, str], dict[int, float]] = {}
        for row in family:
            values.setdefault((row["method"], row["metric"]), {})[row["seed"]] = row["final"]
        pairs = []
        for (one, metric), (other, its) in itertools.combinations(values, 2):
            seeds = [seed for seed in values[one, metric] if seed in values[other, its]]
            if seeds:
                about = (family[0]["split"], one, metric, other, its, len(seeds))
                differences = [values[one, metric][seed] - values[other, its][seed] for seed in seeds]
                pairs.append(dict(zip(FIELDS, about, strict=False)) | difference(differences))
        for pair in _holm(pairs):  # of the whole family, also of pairs that another one has shown
            found.setdefault(tuple(pair[key] for key in FIELDS[:5]), pair)
    return [*found.values()]


def _results(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["status"] == "finished" and row["final"] is not None]


def _families(results: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield, split by split, the main results of each quantity, and those of each metric."""
    for split in dict.fromkeys(row["split"] for row in results):
        own = [row for row in results if row["split"] == split]
        main = [row for row in own if row["main"]]
        for quantity in dict.fromkeys(quantity_of(row["metric"]) for row in main):
            yield [row for row in main if quantity_of(row["metric"]) == quantity]
        for metric in dict.fromkeys(row["metric"] for row in own):
            yield [row for row in own if row["metric"] == metric]


def left_out(rows: Sequence[Row], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return a sentence for each (split, method) of ``pairs`` that is compared with no other, with the reason."""
    compared = {(row["split"], row[side]) for row in comparisons(rows) for side in ("method", "other")}
    results = [row for row in _results(rows) if row["main"]]
    found = []
    for split, method in dict.fromkeys(pairs):
        if (split, method) in compared or len({m for s, m in pairs if s == split}) < 2:
            continue
        ended = {row["seed"]: row["status"] for row in rows if (row["split"], row["method"]) == (split, method)}
        lost = ", ".join(f"{number} {status}" for status, number in Counter(ended.values()).items())
        metric = {row["method"]: row["metric"] for row in results if row["split"] == split}
        why = f"no run has a final result{f' ({lost})' if lost else ''}"
        if method in metric:
            alike = [name for name in metric if quantity_of(metric[name]) == quantity_of(metric[method])]
            why = "it shares no finished seed with another method"
            if alike == [method]:
                why = f"its main metric, {metric[method]}, measures something else than those of the other methods"
        found.append(f"{method}, {split}: {why}.")
    return found


def _holm(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add ``p-holm``: the i-th smallest of m p-values times m - i + 1, made monotone, at most 1."""
    tested = sorted((pair for pair in pairs if pair["p"] is not None), key=lambda pair: pair["p"])
    largest = 0.0
    for rank, pair in enumerate(tested):
        largest = max(largest, min(1.0, pair["p"] * (len(tested) - rank)))
        pair["p-holm"] = largest
    return [{**dict.fromkeys(FIELDS), **pair} for pair in pairs]


def comparisons_markdown(name: str, rows: Sequence[Row], without: Sequence[str] = ()) -> str:
    """Return the pairs as a table, with one seed a sentence in its place, and the sentences of ``left_out``."""
    lines = ["They need two seeds that both methods finished; with more the interval is narrower."]
    if any(row["seeds"] > 1 for row in rows):
        lines = list(_table(rows))
    if without:
        lines += ["", "Left out:", "", *(f"- {sentence}" for sentence in without)]
    return "\n".join([f"# {name}, differences between methods", "", *lines]) + "\n"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    text = (
        f"Final results, paired over the seeds that both methods finished: mean difference and {LEVEL:.0%} confidence "
        "interval (Student's t). An interval without 0 is marked with *; ** if Holm's correction for all pairs of the "
        "split leaves p below 0.05."
    )
    if any(row["metric"] != row["other-metric"] for row in rows):
        text += f" {DIFFERENT_TESTS}"
    heads = ("split", "method", "metric", "against", "metric of it", "difference", "interval", "seeds")
    yield from (text, "", table_line(heads), "|---" * len(heads) + "|")
    for row in rows:
        places = 2 if in_percent(row["metric"]) else 4
        interval = "-" if row["low"] is None else f"{row['low']:+.{places}f} to {row['high']:+.{places}f}"
        sure = row["low"] is not None and (row["low"] > 0 or row["high"] < 0)
        mark = "" if not sure else " **" if row["p-holm"] < 1 - LEVEL else " *"
        mark = mark.replace("*", "\\*")
        shown = f"{row['difference']:+.{places}f}{mark}"
        cells = (*(row[key] for key in FIELDS[:5]), shown, interval, row["seeds"])
        yield table_line(cells)
