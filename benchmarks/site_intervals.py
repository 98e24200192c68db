"""Do the intervals of a site cover the truth, and is a site called better where nothing is?

Federations are drawn whose truth is known: 5 sites of 30 to 300 patients, each with 1 to 5 rows. The two models of a
site have binormal scores: a row's score is mu * label + patient + noise, so AUROC, accuracy at mu / 2, balanced
accuracy and sensitivity at a specificity follow from mu. Patients have 10 to 60 % of the variance, 10 to 60 % of them
are positive, and in every second federation labels differ between the rows of a patient. In the first half of the
federations both models have one mu, in the second half they differ by ``GAIN`` of AUROC.

    python benchmarks/site_intervals.py --out docs/results/site-intervals.csv

It writes for each metric and number of patients: the share of sites without an interval, how often the interval covers
the truth of one model and of the difference, and how often a site is called better or worse (Holm over the sites).
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import special, stats

from fedbn_flwr.lab.sites.intervals import LEVEL, holm
from fedbn_flwr.lab.sites.measured import Measured, gap
from fedbn_flwr.training.tasks import BINARY, REGRESSION, Task

SIZES = (30, 50, 75, 100, 150, 200, 300)
SITES = 5
GAIN = 0.08
BOUND = 0.8
FIELDS: tuple[str, ...] = (
    "metric",
    "patients",
    "sites",
    "undecidable",
    "coverage",
    "too-low",
    "too-high",
    "width",
    "of-difference",
)
FIELDS += ("called-without", "called-with", "percentile", "bca")

Floats = npt.NDArray[np.float64]


class Site:
    """The rows of a site, the two models' scores for them, and the truth."""

    def __init__(self, patients: int, gain: float, mixed: bool, draw: np.random.Generator) -> None:
        rows = draw.integers(1, 6, patients)
        self.groups = np.repeat(np.arange(patients), rows)
        prevalence, between = draw.uniform(0.1, 0.6, 2)
        labels = draw.random(len(self.groups)) if mixed else draw.random(patients)[self.groups]
        self.labels = labels < prevalence
        auroc = draw.uniform(0.6 + gain, 0.95)
        self.mus = [special.ndtri(area) * 2**0.5 for area in (auroc, auroc - gain)]
        common, *own = [self._noise(between, patients, draw) for _ in range(3)]
        self.noise = [0.8**0.5 * common + 0.2**0.5 * one for one in own]

    def _noise(self, between: float, patients: int, draw: np.random.Generator) -> Floats:
        of_patient, of_row = draw.normal(size=patients), draw.normal(size=len(self.groups))
        return np.asarray(between**0.5 * of_patient[self.groups] + (1 - between) ** 0.5 * of_row)

    def measured(self, task: Task) -> list[Measured]:
        """The outputs of the two models; those of a regression are its errors, and its targets 0."""
        found = []
        for mu, noise in zip(self.mus, self.noise, strict=True):
            outputs = noise / mu if task is ERRORS else mu * self.labels + noise - mu / 2
            targets = np.zeros(len(noise)) if task is ERRORS else self.labels
            tensors = torch.from_numpy(outputs)[:, None], torch.from_numpy(targets.astype(float))
            found.append(Measured(task, *tensors, self.groups, int(self.groups[-1]) + 1))
        return found

    def truths(self, metric: str) -> list[float]:
        """The metric of each model over all patients that there could be."""
        mu = np.array(self.mus)
        values = {
            "auroc": special.ndtr(mu / 2**0.5),
            "accuracy": special.ndtr(mu / 2),
            "balanced-accuracy": special.ndtr(mu / 2),
            f"sensitivity-at-specificity:{BOUND}": special.ndtr(mu - special.ndtri(BOUND)),
            "mae": (2 / np.pi) ** 0.5 / mu,
        }
        truths: list[float] = values[metric].tolist()
        return truths


ERRORS = REGRESSION
TASKS = [BINARY.scored_by(name) for name in ("auroc", "accuracy", "balanced-accuracy")]
TASKS += [BINARY.scored_by(f"sensitivity-at-specificity:{BOUND}"), ERRORS]


def bootstrap(measured: Measured, method: str, seed: int) -> tuple[float, float]:
    """The interval of scipy's bootstrap over patients."""
    of_groups = measured.statistic()

    def metric(patients: Any, axis: int = -1) -> Floats:
        drawn = np.atleast_2d(np.moveaxis(patients, axis, -1))
        weights = np.stack([np.bincount(row, minlength=measured.num_groups) for row in drawn]).astype(float)
        return of_groups.at(weights).reshape(np.moveaxis(patients, axis, -1).shape[:-1])

    patients = (np.arange(measured.num_groups),)
    found = stats.bootstrap(
        patients, metric, n_resamples=999, batch=100, confidence_level=LEVEL, method=method, rng=seed
    ).confidence_interval
    return float(found.low), float(found.high)


def covers(low: float | None, high: float | None, truth: float) -> bool:
    return low is not None and high is not None and low <= truth <= high


def simulate(federations: int, bootstrapped: int, seed: int) -> list[dict[str, Any]]:
    """Return a row for each metric and size, and one for all sizes together."""
    seen: dict[tuple[str, int | str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(federations):
        draw = np.random.default_rng((seed, number))
        gain = 0.0 if number < federations / 2 else GAIN
        sizes = draw.choice(SIZES, SITES)
        sites = [Site(int(size), gain, bool(number % 2), draw) for size in sizes]
        for task in TASKS:
            pairs, gaps = [site.measured(task) for site in sites], []
            for size, site, (one, other) in zip(sizes, sites, pairs, strict=True):
                truths, found, paired = site.truths(task.score), one.estimate(), gap([one], [other])
                gaps.append(paired)
                for key in (int(size), "all"):
                    into = seen[task.score, key]
                    into["undecidable"].append(found.low is None)
                    if found.low is None or found.high is None:
                        continue
                    into["coverage"].append(covers(found.low, found.high, truths[0]))
                    into["too-low"].append(found.high < truths[0])
                    into["too-high"].append(found.low > truths[0])
                    into["width"].append(found.high - found.low)
                    if paired.low is not None:
                        into["of-difference"].append(covers(paired.low, paired.high, truths[0] - truths[1]))
                tried = bootstrapped and number % 2 and number % max(1, federations // bootstrapped) < 2
                if tried and found.low is not None:
                    for method in ("percentile", "BCa"):
                        ends = bootstrap(one, method, number)
                        for key in (int(size), "all"):
                            seen[task.score, key][method.lower()].append(covers(*ends, truths[0]))
            tested = [at for at, paired in enumerate(gaps) if paired.p is not None]
            called = dict(zip(tested, holm([gaps[at].p or 0.0 for at in tested]), strict=True))
            for at, size in enumerate(sizes):
                for key in (int(size), "all"):
                    into = seen[task.score, key]
                    into["called-with" if gain else "called-without"].append(called.get(at, 1) < 1 - LEVEL)
    rows = []
    for (metric, size), into in sorted(seen.items(), key=lambda pair: (pair[0][0], str(pair[0][1]).zfill(4))):
        shares: dict[str, Any] = dict.fromkeys(FIELDS, "")
        shares |= {field: f"{np.mean(values):.4f}" for field, values in into.items()}
        rows.append({**shares, "metric": metric, "patients": size, "sites": len(into["undecidable"])})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--federations", type=int, default=1000)
    parser.add_argument("--bootstrapped", type=int, default=0, help="federations with scipy's bootstrap beside it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a CSV file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = simulate(options.federations, options.bootstrapped, options.seed)
    fields = FIELDS
    print("| " + " | ".join(fields) + " |\n|" + " --- |" * len(fields))
    for row in rows:
        print("| " + " | ".join(str(row[field]) for field in fields) + " |")
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, fields, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
