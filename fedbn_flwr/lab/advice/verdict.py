"""Rank the final runs of ``advise``, and write the answer in sentences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedbn_flwr.errors import RunFailedError
from fedbn_flwr.lab.advice.candidates import ALONE, FEDAVG
from fedbn_flwr.lab.advice.halving import Point, Rung
from fedbn_flwr.lab.answer import interval_text, odd_site, shown, template
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.files import site_label, trained
from fedbn_flwr.lab.references import WHY, compare, mean_of, over_seeds, site_rows
from fedbn_flwr.lab.run_files import RunFiles
from fedbn_flwr.lab.studies.one_run import is_done
from fedbn_flwr.lab.studies.study import Study
from fedbn_flwr.lab.studies.tuning import score_of
from fedbn_flwr.training.tasks import higher_is_better, in_percent

_COSTS = ["bytes-down", "bytes-up", "exchanges"]
_ENDS = ("difference-low", "difference-high", WHY)
_OF_SITE = ("examples", "value", "other", "difference", *_ENDS)
_DIFFERENCE = ("difference", "half", "established", "gain", "text")


def verdict(
    study: Study, points: Sequence[Point], metric: str, out: Path
) -> dict[str, Any]:
    """Return the ranking of the final runs, the sites and the answer in sentences.

    Args:
        study: the final runs.
        points: the methods of the study with their rates.
        metric: the score that ranks the methods. A method with another score is not in
            the ranking.
        out: the folder of all runs.

    Raises:
        RunFailedError: no method has a score with every seed.
    """
    scores: dict[str, dict[int, float | None]] = {}
    for cell in study.cells():
        if is_done(cell, out):
            scores.setdefault(cell.method, {})[cell.seed] = score_of(cell, out)
    frame = pd.DataFrame(scores, index=study.seeds, dtype=float).dropna(axis="columns")
    of_metric = [p.candidate.name for p in points if p.candidate.metric == metric]
    means = frame[[name for name in of_metric if name in frame]].mean()
    if means.empty:
        raise RunFailedError(
            f"no method has a score with all of the seeds {study.seeds}, so there is no"
            f" advice. The results so far are in {out}."
        )
    # The choice: the only use of the validation examples.
    chosen = means.sort_values(ascending=not higher_is_better(metric)).to_dict()
    return benefit(study, {str(name): one for name, one in chosen.items()}, metric, out)


def benefit(
    study: Study, chosen: Mapping[str, float], metric: str, out: Path
) -> dict[str, Any]:
    """Return the advice after the choice, from test examples only.

    Args:
        study: the final runs.
        chosen: the methods with their scores, the best first.
        metric: the name of the score.
        out: the folder of all runs.
    """
    runs: dict[str, list[RunFiles]] = {}
    for cell in study.cells():
        if is_done(cell, out):
            runs.setdefault(cell.method, []).append(RunFiles.read(cell.folder(out)))
    best, *others = chosen
    federated = next((name for name in chosen if name != ALONE), "")
    # A comparison that is asked twice is done once.
    pairs = dict.fromkeys((best, other) for other in others)
    if federated and ALONE in runs:
        pairs[federated, ALONE] = None
    # One pair may be there in both directions.
    count = len({frozenset(pair) for pair in pairs})
    compared = {
        (one, other): _compared(runs[one], runs[other], count) for one, other in pairs
    }

    of_best = compared[best, others[0]] if others else {}
    ranking = []
    for name, score in chosen.items():
        of_method, comparison = runs[name], compared.get((best, name), {})
        tests: list[Any] = [run.final.get(run.headline) for run in of_method]
        ledgers = pd.DataFrame([run.summary["ledger"] for run in of_method])
        costs = ledgers.reindex(columns=_COSTS, fill_value=0).mean()
        seconds = (sum(line["seconds"] for line in run.lines) for run in of_method)
        ranking.append(
            {
                "method": name,
                "learning-rate": study.methods[name]["learning-rate"],
                "score": score,
                "test": None if None in tests else statistics.fmean(tests),
                "bytes": costs["bytes-down"] + costs["bytes-up"],
                "exchanges": costs["exchanges"],
                "seconds": statistics.fmean(seconds),
                **{key: comparison.get(key) for key in _DIFFERENCE},
            }
        )
    advice = {
        "metric": metric,
        "best": best,
        "federated": federated,
        "seeds": study.seeds,
        "ranking": ranking,
        "alone": compared.get((federated, ALONE), {}),
        "interval": of_best.get("interval", ""),
        "threshold": of_best.get("threshold", {}),
    }
    return {**advice, "answer": _lines("answer.txt", advice)}


def _lines(name: str, contents: Mapping[str, Any]) -> list[str]:
    """Return the sentences of a template of this folder."""
    text = template(Path(__file__).with_name(name)).render(contents)
    return [line for line in text.splitlines() if line.strip()]


def _compared(
    mine: Sequence[RunFiles], others: Sequence[RunFiles], of: int
) -> dict[str, Any]:
    """Return the difference of two methods on test examples, over seeds and sites."""
    # Runs with one seed have the same test examples. A run may lack its counterpart.
    by_seed = {run.config.seed: run for run in others}
    tables, unknown = [], ""
    for run in mine:
        if run.config.seed in by_seed:
            rows, unknown = site_rows(run, by_seed[run.config.seed])
            tables.append(rows)
    rows, metric = over_seeds(tables), mine[0].headline
    found = compare(mine[0], others[0], rows, of)
    if found is None:
        why = unknown or "no site has a test of both methods"
        return {"why": why, "text": f"not known: {why}", "sites": []}
    mean, why = found.mean, found.too_few or unknown
    text = f"{shown(mean.value, metric, '+')}{interval_text(mean, metric, '+')}"
    result = mean_of(rows) if metric.startswith("personal-own") else None
    return {
        "difference": mean.value,
        "half": mean.half,
        "established": found.established,
        "gain": found.gain,
        "why": why,
        "text": f"not known: {why}" if why else text,
        "interval": interval_text(result, metric) if result else "",
        "threshold": _odd_threshold(rows),
        "sites": [
            {"site": site_label(row), **{key: row.get(key) for key in _OF_SITE}}
            for row in trained(found.by_site.values())
        ],
    }


def _odd_threshold(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the site at which a model says yes too often or too rarely, or {}."""
    row = odd_site(rows, "excess-")
    # The others may be wrong, and this site right.
    if not row or row["excess"] <= 0 or abs(row["excess-value"]) < abs(row["mean"]):
        return {}
    keys = ("examples", "called-value", "yes-value")
    return {"site": site_label(row), **{key: row[key] for key in keys}}


def dropped_by_chance(
    rungs: Sequence[Rung], advice: Mapping[str, Any], num_examples: int
) -> dict[str, float]:
    """Return the methods whose drop chance may explain, with two standard errors.

    The score of such a method is less than two standard errors below a method that
    continued. Both scores are shares of ``num_examples`` right answers.
    """
    metric = advice["metric"]
    if not (in_percent(metric) and higher_is_better(metric)):
        return {}
    continued = [{point.candidate.name for point in rung.scores} for rung in rungs[1:]]
    found: dict[str, float] = {}
    for rung, kept in zip(
        rungs, [*continued, {row["method"] for row in advice["ranking"]}], strict=True
    ):
        best: dict[str, float] = {}
        for point in rung.comparable(metric):
            best.setdefault(point.candidate.name, rung.scores[point] or 0.0)
        # The references continue with any score.
        least = min((best[n] for n in best if n in kept - {FEDAVG, ALONE}), default=1.0)
        half = 2 * math.sqrt(2 * least * (1 - least) / num_examples)
        found |= {n: half for n in best if n not in kept and best[n] > least - half}
    return found


def conditions(
    advice: Mapping[str, Any],
    rungs: Sequence[Rung],
    rounds: tuple[int, int],
    tried: Config,
    given: Config,
    validation: tuple[int, str],
) -> list[str]:
    """Return the conditions that could change the answer.

    Args:
        advice: the result of ``verdict``.
        rungs: the trials, the shortest first. The shortest have all rates.
        rounds: the rounds of the final runs, and of the user's config.
        tried: the config of the first rounds of FedAvg.
        given: the user's config.
        validation: the number of validation examples, and a sentence about them.
    """
    first = rungs[0]
    rates = sorted({point.rate for point in first.scores})
    ends, wider = [], {*rates}
    for row in advice["ranking"]:
        scores = {
            point.rate: score
            for point, score in first.scores.items()
            if point.candidate.name == row["method"]
        }
        rate = row["learning-rate"]
        # Equal scores of all rates do not show that another rate would be better.
        if rate in (rates[0], rates[-1]) and len({*scores.values()}) > 1:
            ends.append(f"{row['method']} (best at {rate})")
            wider.add(float(f"{rate / 3 if rate == rates[0] else 3 * rate:.2g}"))
    contents = {
        "chance": dropped_by_chance(rungs, advice, validation[0]),
        "ends": ends,
        "rates": rates,
        "wider": sorted(wider),
        "rounds": rounds,
        "tried": tried,
        "given": given,
        "examples": validation[0],
        "validation": validation[1],
    }
    return _lines("conditions.txt", {**advice, **contents})
