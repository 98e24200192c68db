"""Paired comparisons of methods over seeds: mean difference, its confidence interval, and Holm's correction.

Runs of two methods with one seed have the same data split and the same initial weights, so their difference varies less
than either result. The interval is Student's: with differences d_1..d_n, mean(d) ± t(0.975, n - 1) s(d) / sqrt(n), s
the sample standard deviation. It needs two seeds, and three give a wide one.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedbn_flwr.lab.studies.rows import Grid, Page, grouped
from fedbn_flwr.training.tasks import in_percent, quantity_of

__all__ = ["DIFFERENT_TESTS", "FIELDS", "LEVEL", "comparisons", "comparisons_page", "difference", "left_out"]

LEVEL = 0.95
_EQUAL = 1e-9  # differences of shares of examples, equal as fractions, differ in float64's last digits
_PAIR = ("split", "method", "metric", "other", "other-metric")
FIELDS = (*_PAIR, "seeds", "difference", "low", "high", "p", "p-holm")
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
    from scipy.stats import ttest_1samp

    test = ttest_1samp(values, 0.0)
    interval = test.confidence_interval(LEVEL)
    return {"difference": mean, "low": float(interval.low), "high": float(interval.high), "p": float(test.pvalue)}


def comparisons(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a row for each pair of methods of a split, from the tidy rows of finished runs.

    The main metrics of two methods are compared if they measure the same quantity, also on different tests: FedBN's
    accuracy is that of the clients' models, FedAvg's that of the global one. Other metrics are compared by their name.

    The seeds are those that both methods finished. ``p-holm`` is corrected for all pairs of main metrics of the split,
    or for all pairs of another metric (Holm 1979): below 0.05, the difference is not explained by having looked at many
    pairs.
    """
    compared: dict[tuple[str, ...], dict[str, Any]] = {}
    for family in _families(_results(rows)):
        values: dict[tuple[str, str], dict[int, float]] = {}
        for row in family:
            values.setdefault((row["method"], row["metric"]), {})[row["seed"]] = row["final"]
        pairs = []
        for (one, finals), (other, other_finals) in itertools.combinations(values.items(), 2):
            differences = [final - other_finals[seed] for seed, final in finals.items() if seed in other_finals]
            if differences:
                names = dict(zip(_PAIR, (family[0]["split"], *one, *other), strict=True))
                pairs.append({**names, "seeds": len(differences), **difference(differences), "p-holm": None})
        _correct(pairs)  # for the whole family, also for pairs that another one has shown
        for pair in pairs:
            compared.setdefault(tuple(pair[key] for key in _PAIR), pair)
    return [*compared.values()]


def _results(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["status"] == "finished" and row["final"] is not None]


def _families(results: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield, split by split, the main results of each quantity, and those of each metric."""
    for of_split in grouped(results, lambda row: row["split"]).values():
        main = [row for row in of_split if row["main"]]
        yield from grouped(main, lambda row: quantity_of(row["metric"])).values()
        yield from grouped(of_split, lambda row: row["metric"]).values()


def left_out(rows: Sequence[Row], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return a sentence for each (split, method) of ``pairs`` that is compared with no other, with the reason."""
    compared = {(row["split"], row[side]) for row in comparisons(rows) for side in ("method", "other")}
    sentences = []
    for split, method in dict.fromkeys(pairs):
        if (split, method) in compared or len({m for s, m in pairs if s == split}) < 2:
            continue
        main = [row for row in _results(rows) if row["main"] and row["split"] == split]
        metrics = {row["method"]: row["metric"] for row in main}
        quantities = [quantity_of(metric) for metric in metrics.values()]
        if method not in metrics:
            ended = {row["seed"]: row["status"] for row in rows if (row["split"], row["method"]) == (split, method)}
            lost = ", ".join(f"{number} {status}" for status, number in Counter(ended.values()).items())
            why = f"no run has a final result{f' ({lost})' if lost else ''}"
        elif quantities.count(quantity_of(metrics[method])) == 1:
            why = f"its main metric, {metrics[method]}, measures something else than those of the other methods"
        else:
            why = "it shares no finished seed with another method"
        sentences.append(f"{method}, {split}: {why}.")
    return sentences


def _correct(pairs: Sequence[dict[str, Any]]) -> None:
    """Set ``p-holm``: the i-th smallest of m p-values times m - i + 1, made monotone, at most 1."""
    tested = sorted((pair for pair in pairs if pair["p"] is not None), key=lambda pair: pair["p"])
    largest = 0.0
    for rank, pair in enumerate(tested):
        largest = max(largest, min(1.0, pair["p"] * (len(tested) - rank)))
        pair["p-holm"] = largest


def comparisons_page(name: str, rows: Sequence[Row], without: Sequence[str] = ()) -> Page:
    """Return the pairs as a table, with one seed a sentence in its place, and the sentences of ``left_out``."""
    parts: list[Grid | str] = ["They need two seeds that both methods finished; with more the interval is narrower."]
    if any(row["seeds"] > 1 for row in rows):
        parts = [_explained(rows), _grid(rows)]
    if without:
        parts += ["Left out:", "\n".join(f"- {sentence}" for sentence in without)]
    return Page(f"{name}, differences between methods", tuple(parts))


def _explained(rows: Sequence[Row]) -> str:
    text = (
        f"Final results, paired over the seeds that both methods finished: mean difference and {LEVEL:.0%} confidence "
        "interval (Student's t). An interval without 0 is marked with *; ** if Holm's correction for all pairs of the "
        "split leaves p below 0.05."
    )
    if any(row["metric"] != row["other-metric"] for row in rows):
        text += f" {DIFFERENT_TESTS}"
    return text


def _grid(rows: Sequence[Row]) -> Grid:
    head = ("split", "method", "metric", "against", "metric of it", "difference", "interval", "seeds")
    lines = []
    for row in rows:
        form = "+.2f" if in_percent(row["metric"]) else "+.4f"
        shown, interval = f"{row['difference']:{form}}", "-"
        if row["low"] is not None:
            interval = f"{row['low']:{form}} to {row['high']:{form}}"
            if row["low"] > 0 or row["high"] < 0:
                shown += " **" if row["p-holm"] < 1 - LEVEL else " *"
        lines.append([*(row[key] for key in _PAIR), shown, interval, row["seeds"]])
    return Grid.of(head, lines)
