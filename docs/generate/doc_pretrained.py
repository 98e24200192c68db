"""The results of ``studies/pretrained.yaml``: the tables and sentences of the guide."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import yaml

from fedbn_flwr.lab.results.intervals import Interval, over_seeds

__all__ = ["Line", "pretrained_block", "pretrained_lines"]


class Line(NamedTuple):
    """The result of a method on a split.

    Attributes:
        method: its name, such as "FedBN, norms and head".
        finals: the accuracy in percent by seed, of the runs that did not diverge.
        megabytes: the floats of a run, down and up, divided by the number of clients.
    """

    method: str
    finals: Mapping[int, float]
    megabytes: float

    @property
    def accuracy(self) -> Interval:
        """The mean over the seeds."""
        return over_seeds([_percent(one, 0) for one in self.finals.values()])

    def above(self, other: Line) -> Interval:
        """Return the mean difference over the seeds of both."""
        seeds = sorted(self.finals.keys() & other.finals.keys())
        gaps = [self.finals[seed] - other.finals[seed] for seed in seeds]
        return over_seeds([_percent(gap, -100) for gap in gaps])


def _percent(value: float, lowest: float) -> Interval:
    return Interval(value, limits=(lowest, 100.0))


def pretrained_lines(root: Path) -> dict[str, list[Line]]:
    """Return the methods of each split, the best first."""
    study = yaml.safe_load((root / "studies/pretrained.yaml").read_text("utf-8"))
    splits = study["splits"]
    path = root / "docs/results/pretrained/results.csv"
    with path.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if not row["domain"]]
    found: dict[str, list[Line]] = {}
    for split, method in dict.fromkeys((row["split"], row["method"]) for row in rows):
        own = [row for row in rows if (row["split"], row["method"]) == (split, method)]
        finals = {int(row["seed"]): float(row["final"]) for row in own if row["final"]}
        if finals:
            sent = fmean(float(row["bytes"]) for row in own) / 2**20
            line = Line(method, finals, sent / splits[split]["num-clients"])
            found.setdefault(split, []).append(line)
    for lines in found.values():
        lines.sort(key=lambda line: -fmean(line.finals.values()))
    return found


def pretrained_block(root: Path) -> str:
    """Return a sentence on each split, and the table of all splits."""
    found = pretrained_lines(root)
    table = [
        "| data | method | % (95 %) | MB of floats per client |",
        "|---|---|---|---|",
    ]
    for split, lines in found.items():
        for line in lines:
            accuracy = _between(line.accuracy, ".1f")
            table.append(
                f"| {split} | {line.method} | {accuracy} | {line.megabytes:.3g} |"
            )
    sentences = [f"- {_verdict(split, lines)}" for split, lines in found.items()]
    return "\n".join(["", *sentences, "", *table, "", _setting(found), ""])


def _setting(found: Mapping[str, Sequence[Line]]) -> str:
    """Return a sentence about the seeds and the rates."""
    each = {seed for lines in found.values() for line in lines for seed in line.finals}
    rate = "[tuned](../results/pretrained/tuning.txt) for each method"
    return f"Seeds: {', '.join(map(str, sorted(each)))}. Learning rate: {rate}."


def _verdict(split: str, lines: Sequence[Line]) -> str:
    """Compare the best whole model with the best part."""
    whole = next(line for line in lines if line.method.endswith(", all"))
    part = next(line for line in lines if not line.method.endswith(", all"))
    gap = whole.above(part)
    shown = _between(gap, "+.1f")
    if gap.side() > 0:
        verdict = (
            f"The part is not enough here: the whole model is better by {shown} points."
        )
    elif gap.side() < 0:
        verdict = f"The part is better: the whole model differs by {shown} points."
    else:
        count = len(whole.finals.keys() & part.finals.keys())
        verdict = (
            f"{count} seeds do not separate the two (whole minus part: {shown} points)."
        )
    return (
        f"**{split}**: the best whole model is {_named(whole)}, the best part"
        f" {_named(part)}, with {whole.megabytes / part.megabytes:.0f} times fewer bytes."
        f" {verdict}"
    )


def _named(line: Line) -> str:
    return f"*{line.method}* ({line.accuracy.value:.1f})"


def _between(found: Interval, form: str) -> str:
    low, high = found.ends()
    text = f"{found.value:{form}}"
    return text if low is None else f"{text} ({low:{form}} to {high:{form}})"
