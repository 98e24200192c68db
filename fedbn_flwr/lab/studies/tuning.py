"""Choose settings of a study by the scores of its trials."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fedbn_flwr.lab.config import data_of, number
from fedbn_flwr.lab.early_stopping import validation_metric
from fedbn_flwr.lab.results.folder import DIVERGED_AT
from fedbn_flwr.lab.results.numbers import with_unit
from fedbn_flwr.lab.studies.one_run import is_done, summary_of
from fedbn_flwr.lab.studies.study import TUNE, Cell, Study, StudySettings, point_name
from fedbn_flwr.lab.studies.tables import markdown


@dataclass(frozen=True)
class Tuned:
    """The score of each point of the grid for one METHOD/SPLIT, and the best point.

    Attributes:
        name: METHOD/SPLIT.
        metric: the name of the score.
        scores: the mean score over the seeds by point, such as "learning-rate=0.1";
            None if a trial diverged or has no score.
        best: the point with the best score, the first of equal points; None if no point
            has a score.
        warning: why another grid may have a better point, or "".
    """

    name: str
    metric: str
    scores: dict[str, float | None]
    best: str | None
    warning: str


def tuned(study: Study, out: Path) -> tuple[list[Tuned], dict[str, StudySettings]]:
    """Return the scores of the trials, and the best settings by METHOD/SPLIT.

    A METHOD/SPLIT with an unfinished trial is left out. If all its trials diverged, it
    keeps the study's own settings, with a warning. There is also a warning if the best
    point is at an end of the grid.
    """
    tuning = study.tuning()
    if tuning is None or study.tune is None:
        return [], {}
    points = {point_name(point): point for point in study.tune.points()}
    cells: dict[str, list[Cell]] = {}
    for cell in tuning.cells():
        cells.setdefault(f"{cell.method}/{cell.split}", []).append(cell)
    chosen: dict[str, StudySettings] = {}
    results = []
    for name in study.names():
        trials = {point: cells.get(f"{name}/{point}", []) for point in points}
        all_trials = [*itertools.chain(*trials.values())]
        if not all_trials or not all(is_done(cell, out / TUNE) for cell in all_trials):
            continue

        # Find the mean score of each point over the seeds, and the best point.
        config = all_trials[0].config
        scores: dict[str, float | None] = {}
        usable = {}
        for trial, repeats in trials.items():
            finals = [_score_of(cell, out / TUNE) for cell in repeats]
            # Without the score of a seed, the mean over the other seeds would favour
            # this point.
            scores[trial] = None
            known = [final for final in finals if final is not None]
            if len(known) == len(finals):
                scores[trial] = usable[trial] = statistics.fmean(known)
        choose = max if data_of(config).task.higher_is_better else min
        best = choose(usable, key=usable.__getitem__, default=None)
        warning = "no trial of tune has a score. The study's own settings are used"
        if best is not None:
            chosen[name] = points[best]
            ends = [*_at_ends(points[best], study.tune.grid)]
            warning = f"{', '.join(ends)} is best, but at the end of its grid."
            warning = f"{warning} Try a larger grid" if ends else ""
        results.append(Tuned(name, validation_metric(config), scores, best, warning))
    return results, chosen


def _at_ends(point: StudySettings, grid: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Yield each number that is the smallest or the largest of three or more."""
    for key, value in point.items():
        known = [number(str(one)) for one in grid[key]]
        numbers = [one for one in known if one is not None]
        ends = min(numbers, default=None), max(numbers, default=None)
        if len(numbers) > 2 and number(str(value)) in ends:
            yield f"{key}={value}"


def tuning_markdown(name: str, results: Sequence[Tuned]) -> str:
    """Return the scores of all points as a Markdown table."""
    rows = []
    for tried in results:
        scores = {trial: _shown(tried, trial) for trial in tried.scores}
        rows.append({"METHOD/SPLIT": tried.name, "metric": tried.metric, **scores})
    table = markdown(pd.DataFrame(rows).fillna("-"))
    return f"# {name}, settings chosen by validation\n\n{table}\n"


def _score_of(cell: Cell, out: Path) -> float | None:
    """Return the validation score of a run, or None if it diverged or has none."""
    summary = summary_of(cell.folder(out))
    if DIVERGED_AT in summary:
        return None
    score = summary["final"].get(validation_metric(cell.config))
    return score if score is not None and math.isfinite(score) else None


def _shown(tried: Tuned, trial: str) -> str:
    score = tried.scores[trial]
    if score is None:
        return "-"
    text = with_unit(score, tried.metric)
    return f"{text} (chosen)" if trial == tried.best else text
