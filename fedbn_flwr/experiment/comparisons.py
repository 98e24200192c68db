"""Paired comparisons of methods over seeds: mean difference, its confidence interval, and Holm's correction.

Runs of two methods with one seed have the same data split and the same initial weights, so their difference varies less
than either result. The interval is Student's: with differences d_1..d_n, mean(d) ± t(0.975, n - 1) s(d) / sqrt(n), s
the sample standard deviation. It needs two seeds, and three give a wide one.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedbn_flwr.training.tasks import in_percent

__all__ = ["FIELDS", "LEVEL", "comparisons", "comparisons_markdown", "difference"]

LEVEL = 0.95
FIELDS = ("split", "metric", "method", "other", "seeds", "difference", "low", "high", "p", "p-holm")


def difference(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean, confidence interval and two-sided p of paired differences (t test against 0).

    Equal differences, and a single one, have neither: their spread is not known. On a small test set a few seeds often
    differ by the same number of examples.
    """
    mean = statistics.fmean(values)
    if len(set(values)) < 2:
        return {"difference": mean, "low": None, "high": None, "p": None}
    from scipy.stats import t

    error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(t.ppf((1 + LEVEL) / 2, len(values) - 1)) * error
    p = 2 * float(t.sf(abs(mean) / error, len(values) - 1))
    return {"difference": mean, "low": mean - half, "high": mean + half, "p": p}


def comparisons(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each pair of methods of a split and metric, from the tidy rows of finished runs.

    The seeds are those that both methods finished. ``p-holm`` is corrected for all pairs of the split and metric
    (Holm 1979): below 0.05, the difference is not explained by having looked at many pairs.
    """
    found: list[dict[str, Any]] = []
    finished = [row for row in rows if row["status"] == "finished" and row["final"] is not None]
    for split, metric in dict.fromkeys((row["split"], row["metric"]) for row in finished):
        own = [row for row in finished if (row["split"], row["metric"]) == (split, metric)]
        finals: dict[str, dict[int, float]] = {}
        for row in own:
            finals.setdefault(row["method"], {})[row["seed"]] = row["final"]
        pairs = []
        for one, other in itertools.combinations(finals, 2):
            if seeds := [seed for seed in finals[one] if seed in finals[other]]:
                about = {"split": split, "metric": metric, "method": one, "other": other, "seeds": len(seeds)}
                pairs.append({**about, **difference([finals[one][seed] - finals[other][seed] for seed in seeds])})
        found += _holm(pairs)
    return found


def _holm(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add ``p-holm``: the i-th smallest of m p-values times m - i + 1, made monotone, at most 1."""
    tested = sorted((pair for pair in pairs if pair["p"] is not None), key=lambda pair: pair["p"])
    largest = 0.0
    for rank, pair in enumerate(tested):
        largest = max(largest, min(1.0, pair["p"] * (len(tested) - rank)))
        pair["p-holm"] = largest
    return [{**dict.fromkeys(FIELDS), **pair} for pair in pairs]


def comparisons_markdown(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the pairs as a table; with one seed a sentence in its place."""
    title = f"# {name}, differences between methods"
    if all(row["seeds"] < 2 for row in rows):
        return f"{title}\n\nThey need two seeds that both methods finished; with more the interval is narrower.\n"
    lines = [
        title,
        "",
        f"Final results, paired over the seeds that both methods finished: mean difference and {LEVEL:.0%} confidence "
        "interval (Student's t). An interval without 0 is marked with *; ** if Holm's correction for all pairs of the "
        "split leaves p below 0.05.",
        "",
        "| split | metric | method | against | difference | interval | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        places = 2 if in_percent(row["metric"]) else 4
        interval = "-" if row["low"] is None else f"{row['low']:+.{places}f} to {row['high']:+.{places}f}"
        sure = row["low"] is not None and (row["low"] > 0 or row["high"] < 0)
        mark = "" if not sure else " **" if row["p-holm"] < 1 - LEVEL else " *"
        mark = mark.replace("*", "\\*")
        shown = f"{row['difference']:+.{places}f}{mark}"
        cells = (row["split"], row["metric"], row["method"], row["other"], shown, interval, row["seeds"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"
