"""The verdict on a model from labels: better than the base rate, worse, or undecided.

The base rate is the share of the most frequent class. On the labelled examples, the
model and the guess of this class differ in w examples that only the model has right,
and l that only the guess has right. The exact test of w against l decides (McNemar), at
the level 5 %. All examples of a patient count as one. With two classes, the interval of
the AUROC must also not be below 50 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedbn_flwr.lab.results.intervals import (
    LEVEL,
    Interval,
    at_threshold,
    interval,
    share,
)
from fedbn_flwr.lab.results.numbers import shown, with_unit
from fedbn_flwr.lab.results.predictions import SiteTest

_MOST_LABELS = 10_000
_BINS = 5


@dataclass(frozen=True)
class LabelVerdict:
    """The results of a model on labelled examples.

    Attributes:
        state: "good", "bad" or "undecided".
        answer: the verdict, in a sentence.
        rows: name and intervals of each figure, at 0.5 and at the threshold of the
            sites, if it is known.
        curve: mean probability and share of positive labels, from low to high
            probabilities; empty unless there are two classes.
        labels: the labels that would decide; 0 if the verdict is not open.
    """

    state: str
    answer: str
    rows: dict[str, list[Interval]]
    curve: list[tuple[float, float]]
    labels: int = 0


def verdict(test: SiteTest, threshold: float | None = None) -> LabelVerdict | None:
    """Return the verdict, or None if the task does not have one class per example.

    Args:
        test: the outputs and the labels.
        threshold: the logit above which the training sites would call an example
            positive; None without it.
    """
    binary = test.task.name == "binary"
    if test.task.name not in ("binary", "classification"):
        return None
    kept = test.task.counting(test.targets).flatten()
    outputs, targets = test.outputs[kept], test.targets[kept].flatten().long()
    called = (outputs.flatten() > 0).long() if binary else outputs.argmax(1)
    most = int(targets.bincount().argmax())
    right, guess = called == targets, targets == most
    wins, losses = int((right & ~guess).sum()), int((guess & ~right).sum())
    units = len(test.groups) / len(test.units)
    state, labels = _decided(wins, losses, len(targets), units)
    of_each = test.units[kept.numpy()]
    accuracy, base = share(right, of_each), share(guess, of_each)
    answer = (
        f"{_WORDS[state]}: accuracy {percent(accuracy)}; base rate {percent(base)}."
    )
    rows = {"accuracy": [accuracy], "base rate": [base]}
    curve: list[tuple[float, float]] = []
    if binary:
        auroc = interval(test.scored_by("auroc"))
        # Import here, because scikit-learn takes long to import.
        from sklearn.calibration import calibration_curve

        low, high = auroc.ends()
        chance = "not decided against 50"
        if (low or 0) > 0.5:
            chance = "above 50"
        if high is not None and high < 0.5:
            state, labels, chance = "bad", 0, "below 50"
            answer = f"{_WORDS[state]}: the order is reversed, as with other labels."
        answer += f" AUROC {percent(auroc)}: {chance}."
        logits = outputs.flatten()
        cuts = [0.0, *([] if threshold is None else [threshold])]
        by_cut = [at_threshold(test, cut) for cut in cuts]
        rows = {name: [one[name] for one in by_cut] for name in by_cut[0]}
        rows["AUROC"] = [auroc]
        means = logits.double().sigmoid()
        both = calibration_curve(targets, means, n_bins=_BINS, strategy="quantile")
        curve = [(mean, true) for true, mean in np.stack(both).T.tolist()]
    else:
        often = int(called.bincount().argmax())
        rows["most frequent prediction"] = [share(called == often, of_each)]
    if state == "undecided":
        word = "about" if labels < _MOST_LABELS else "over"
        answer += (
            f" With this difference, {word} {labels:,} labels would decide; fewer leave"
            " it open."
        )
    return LabelVerdict(state, answer, rows, curve, labels)


_WORDS = {
    "good": "Better than the base rate",
    "bad": "Do not use this model here",
    "undecided": "Undecided",
}


def threshold_of_sites(tests: Iterable[SiteTest]) -> float | None:
    """Return the logit with the largest sensitivity plus specificity at the sites."""
    from sklearn.metrics import roc_curve

    tests = [test for test in tests if test.task.name == "binary"]
    tests = [test for test in tests if test.outputs.isfinite().all()]
    targets = [one for test in tests for one in test.targets.flatten().tolist()]
    if len({*targets}) < 2:
        return None
    outputs = torch.cat([test.outputs.flatten() for test in tests])
    scores = outputs.double().numpy()
    false, true, cuts = roc_curve(targets, scores, drop_intermediate=False)
    best = (true - false).argmax()
    # An example is positive above the threshold, so take the middle of two outputs. The
    # first one is infinite: no threshold is better than to call no example positive.
    middle = float(cuts[best : best + 2].mean())
    return middle if math.isfinite(middle) else None


def figures(verdict: LabelVerdict) -> dict[str, Any]:
    """Return the verdict in JSON values."""
    rows = {
        name: [{"value": one.value, "ends": one.ends()} for one in numbers]
        for name, numbers in verdict.rows.items()
    }
    return {**vars(verdict), "rows": rows}


def _decided(wins: int, losses: int, count: int, units: float) -> tuple[str, int]:
    """Return the state, and the number of labels that would decide an open one.

    ``units`` is the number of units for each example.
    """
    from scipy import stats

    both = wins + losses
    won, lost = round(units * wins), round(units * losses)
    if won + lost and stats.binomtest(won, won + lost).pvalue < 1 - LEVEL:
        return ("good" if wins > losses else "bad"), 0
    if wins == losses:
        return "undecided", _MOST_LABELS
    # With the same shares of wins and losses, more units decide in the same exact test.
    # Take its own limit, because a normal approximation names too few labels.
    differ = np.arange(1, _MOST_LABELS)
    more = differ * max(wins, losses) // both
    enough = differ[2 * stats.binom.sf(more - 1, differ, 0.5) < 1 - LEVEL]
    needed = min(enough, default=_MOST_LABELS) * count / both / units
    return "undecided", min(_MOST_LABELS, max(count + 1, math.ceil(needed)))


def table_of(found: LabelVerdict) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table of the figures."""
    cuts = max(map(len, found.rows.values()))
    at_first = "at 0.5" if "sensitivity" in found.rows else "share"
    head = ["", at_first, "at the sites' threshold"][: cuts + 1]
    rows = [
        [name, *map(percent, numbers), *[""] * (cuts - len(numbers))]
        for name, numbers in found.rows.items()
    ]
    return head, rows


def percent(number: Interval) -> str:
    """Return a share in per cent, with its interval."""
    if number.value is None:
        return "-"
    low, high = number.ends()
    text = with_unit(number.value, "accuracy")
    if low is None:
        return text
    return f"{text} ({shown(low, 'accuracy')} to {shown(high, 'accuracy')})"
