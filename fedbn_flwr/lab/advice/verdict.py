"""Rank the final runs of ``advise``, and write the answer in sentences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedbn_flwr.errors import RunFailedError
from fedbn_flwr.lab.advice.candidates import ALONE, FEDAVG
from fedbn_flwr.lab.advice.halving import Point, Rung, score_of
from fedbn_flwr.lab.answer import shown
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.files import STUDY_FILE, site_label
from fedbn_flwr.lab.references import site_rows
from fedbn_flwr.lab.run_files import RunFiles
from fedbn_flwr.lab.studies.one_run import is_done
from fedbn_flwr.lab.studies.results import half_interval
from fedbn_flwr.lab.studies.study import Study
from fedbn_flwr.training.tasks import higher_is_better, in_percent, quantity_of


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
    runs: dict[str, list[RunFiles]] = {}
    scores: dict[str, dict[int, float | None]] = {}
    for cell in study.cells():
        if is_done(cell, out):
            runs.setdefault(cell.method, []).append(RunFiles.read(cell.folder(out)))
            scores.setdefault(cell.method, {})[cell.seed] = score_of(cell, out)
    frame = pd.DataFrame(scores, index=study.seeds, dtype=float).dropna(axis="columns")
    known = {p.candidate.name: p for p in points if p.candidate.name in frame}
    ranked = [name for name, p in known.items() if p.candidate.metric == metric]
    if not ranked:
        raise RunFailedError(
            f"no method has a score with all of the seeds {study.seeds}, so there is no"
            f" advice. The results so far are in {out}."
        )

    # Rank by the mean score over the seeds, with paired differences from the best.
    means = frame[ranked].mean().sort_values(ascending=not higher_is_better(metric))
    best = str(means.index[0])
    ranking = []
    for name in map(str, means.index):
        gap = frame[best] - frame[name]
        half = half_interval(gap)
        tests = pd.Series([run.final.get(run.headline) for run in runs[name]])
        seconds = (sum(line["seconds"] for line in run.lines) for run in runs[name])
        ledgers = [run.summary["ledger"] for run in runs[name]]
        ranking.append(
            {
                "method": name,
                "learning-rate": known[name].rate,
                "score": frame[name].mean(),
                "difference": None if name == best else gap.mean(),
                "half": None if math.isnan(half) else half,
                "test": None if tests.hasnans else tests.mean(),
                "bytes": statistics.fmean(
                    one.get("bytes-down", 0) + one.get("bytes-up", 0) for one in ledgers
                ),
                "exchanges": statistics.fmean(
                    one.get("exchanges", 0) for one in ledgers
                ),
                "seconds": statistics.fmean(seconds),
            }
        )
    federated = next((row["method"] for row in ranking if row["method"] != ALONE), "")
    sites, unknown = _sites(runs.get(federated, ()), runs.get(ALONE, ()))
    advice = {
        "metric": metric,
        "best": best,
        "federated": federated,
        "seeds": study.seeds,
        "ranking": ranking,
        "sites": sites,
    }
    return {**advice, "answer": [*sentences(advice), *unknown]}


def _sites(
    federated: Sequence[RunFiles], alone: Sequence[RunFiles]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the difference from training alone at each site, or why it is unknown.

    Difference and interval are means over the seeds. The interval covers other test
    examples of the site.
    """
    # Runs with one seed have the same test examples. A run may lack its counterpart.
    others = {run.config.seed: run for run in alone}
    found = []
    for run in federated if others else ():
        rows, unknown = site_rows(run, others.get(run.config.seed))
        if unknown:
            return [], [unknown]
        found += [{**row, "site": site_label(row)} for row in rows]
    if not found:
        return [], []
    ends = ["difference", "difference-low", "difference-high"]
    frame = pd.DataFrame(found, columns=["site", *ends])
    # A difference is unknown if a seed lacks it: AUROC needs both classes at the site.
    means = frame.groupby("site", sort=False)[ends].agg(
        lambda values: values.astype(float).mean(skipna=False)
    )
    rows = means.astype(object).where(means.notna(), None).reset_index()
    return rows.to_dict("records"), []


def sentences(advice: Mapping[str, Any]) -> Iterator[str]:
    """Yield the answer in plain words."""
    metric = advice["metric"]
    unit = " %" if in_percent(metric) else ""
    first, *others = advice["ranking"]
    if advice["best"] == ALONE:
        yield "Train each site alone: this has the best score."
    else:
        yield f"Use {first['method']} with learning-rate={first['learning-rate']}."
    text = (
        f"Its {quantity_of(metric)} on the validation examples is"
        f" {shown(first['score'], metric)}{unit}, the mean of"
        f" {len(advice['seeds'])} seeds"
    )
    if first["test"] is not None:
        text += f"; on the test examples it is {shown(first['test'], metric)}{unit}"
    yield f"{text}."
    better: list[str] = []
    cheaper: list[str] = []
    undecided: list[str] = []
    for row in others:
        gap, half = row["difference"], row["half"]
        spread = "with every seed"
        if half is not None:
            low, high = (shown(end, metric, "+") for end in (gap - half, gap + half))
            spread = f"95 % interval {low} to {high}"
        text = f"{row['method']} ({shown(gap, metric, '+')}, {spread})"
        # Equal differences have no interval, so they establish nothing.
        if abs(gap) > (half or math.inf):
            better.append(text)
            continue
        undecided.append(text)
        if row["exchanges"] < first["exchanges"]:
            cheaper.append(f"{row['method']} {row['exchanges']:g}")
    if better:
        yield f"It is better than {' and '.join(better)}."
    if undecided:
        yield f"No difference from {' or from '.join(undecided)} is established."
    if cheaper:
        yield (
            f"If the difference does not matter to you, take a cheaper method. Exchanges:"
            f" {first['method']} {first['exchanges']:g}, {', '.join(cheaper)}."
        )
    if advice["sites"]:
        yield (
            f"On the test examples of each site, {advice['federated']} compared with"
            f" training alone is {_worth(advice)} of {len(advice['sites'])} sites."
        )
        if not metric.startswith("personal"):
            yield (
                "The ranking compares single models for all sites. Training alone makes a"
                " model for each site and is not in the ranking."
            )


def _worth(advice: Mapping[str, Any]) -> str:
    """Return the names of the sites with a better, a worse or an unclear result."""
    sign = 1 if higher_is_better(advice["metric"]) else -1
    found: dict[str, list[str]] = {
        side: [] for side in ("better", "worse", "not clearly different", "not known")
    }
    for row in advice["sites"]:
        side = "not known"
        if row["difference-low"] is not None:
            ends = [sign * row["difference-low"], sign * row["difference-high"]]
            side = "not clearly different"
            if min(ends) > 0 or max(ends) < 0:
                side = "better" if min(ends) > 0 else "worse"
        found[side].append(row["site"])
    return ", ".join(
        f"{side} at {len(names)}" + f" ({', '.join(names)})" * (len(names) < 5)
        for side, names in found.items()
        if names
    )


def dropped_by_chance(
    rungs: Sequence[Rung], advice: Mapping[str, Any], num_examples: int
) -> str:
    """Return a sentence with the methods whose drop chance may explain, or "".

    The score of such a method is less than two standard errors below a method that
    continued. Both scores are shares of ``num_examples`` right answers.
    """
    metric = advice["metric"]
    if not (in_percent(metric) and higher_is_better(metric)):
        return ""
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
    if not found:
        return ""
    return (
        f"Chance may have dropped {', '.join(found)}: {num_examples} validation examples"
        f" do not distinguish scores within {100 * max(found.values()):.0f} points. Use"
        " more rounds or a larger validation-share, or compare them by"
        " `fedbn-flwr sweep`."
    )


def conditions(
    advice: Mapping[str, Any],
    rungs: Sequence[Rung],
    rounds: tuple[int, int],
    tried: Config,
    given: Config,
    counts: Sequence[int],
) -> Iterator[str]:
    """Yield the conditions that could change the answer.

    Args:
        advice: the result of ``verdict``.
        rungs: the trials, the shortest first. The shortest have all rates.
        rounds: the rounds of the final runs, and of the user's config.
        tried: the config of the first rounds of FedAvg.
        given: the user's config.
        counts: the validation examples of each site.
    """
    first = rungs[0]
    chance = dropped_by_chance(rungs, advice, sum(counts))
    if chance:
        yield chance
    rates = sorted({point.rate for point in first.scores})
    ends = []
    for row in advice["ranking"]:
        scores = {
            point.rate: score
            for point, score in first.scores.items()
            if point.candidate.name == row["method"]
        }
        rate = row["learning-rate"]
        # Equal scores of all rates do not show that another rate would be better.
        if rate in (rates[0], rates[-1]) and len({*scores.values()}) > 1:
            ends.append(f"{row['method']} at {rate}")
    if ends:
        yield (
            f"A further rate may be better: {', '.join(ends)} is at the end of the tried"
            f" rates {', '.join(map(str, rates))}. Try other --rates."
        )
    if rounds[0] < rounds[1]:
        yield (
            f"The final runs had {rounds[0]} of {rounds[1]} rounds, because of the"
            " budget. Slow methods may gain from more rounds."
        )
    if len(advice["ranking"]) > 1:
        yield (
            f"More seeds make the intervals narrower: add seeds to {STUDY_FILE}, and"
            " sweep it into the same folder."
        )
    if tried.eval_on.startswith("personal"):
        yield (
            "Each site was tested on its own examples. If you need one model for all"
            " sites, set eval-on=global and ask again."
        )
    if given.early_stopping:
        yield (
            f"The compared runs had no early stopping, and the recommended config has"
            f" early-stopping={given.early_stopping}."
        )
    yield (
        f"The sites kept {100 * tried.validation_share:g} % of their training examples to"
        f" choose the method. The recommended config keeps"
        f" {100 * given.validation_share:g} %. {validation_text(counts)}"
    )


def validation_text(counts: Sequence[int]) -> str:
    """Return the numbers of validation examples of the sites as a sentence."""
    return (
        f"{sum(counts):,} validation examples choose the method, {min(counts):,} at the"
        " smallest site."
    )
