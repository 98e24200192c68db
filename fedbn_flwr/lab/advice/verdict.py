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
from fedbn_flwr.lab.answer import interval_text, shown
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.files import STUDY_FILE, site_label, trained
from fedbn_flwr.lab.references import WHY, compare, mean_of, over_seeds, site_rows
from fedbn_flwr.lab.run_files import RunFiles
from fedbn_flwr.lab.studies.one_run import is_done
from fedbn_flwr.lab.studies.study import Study
from fedbn_flwr.training.tasks import higher_is_better, in_percent, quantity_of

_COSTS = ["bytes-down", "bytes-up", "exchanges"]
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
    compared = {pair: _compared(*map(runs.get, pair), len(pairs)) for pair in pairs}

    ranking = []
    for name, score in chosen.items():
        of_method, comparison = runs[name], compared.get((best, name), {})
        tests = [run.final.get(run.headline) for run in of_method]
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
        "interval": next(iter(compared.values()))["interval"] if others else "",
    }
    return {**advice, "answer": [*sentences(advice)]}


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
    keys = ("examples", *_DIFFERENCE[:1], "difference-low", "difference-high")
    return {
        "difference": mean.value,
        "half": mean.half,
        "established": found.established,
        "gain": found.gain,
        "why": why,
        "text": f"not known: {why}" if why else text,
        "interval": interval_text(result, metric) if result else "",
        "sites": [
            {"site": site_label(row), **{key: row.get(key) for key in (*keys, WHY)}}
            for row in trained(found.by_site.values())
        ],
    }


def sentences(advice: Mapping[str, Any]) -> Iterator[str]:
    """Yield the answer in plain words."""
    metric, (first, *others) = advice["metric"], advice["ranking"]
    name, seeds = first["method"], len(advice["seeds"])
    start = f"Use {name} with learning-rate={first['learning-rate']}"
    if name == ALONE:
        start = "Train each site alone"
    yield f"{start}: it has the best score on the validation examples, which only choose."
    if first["test"] is not None:
        unit = " %" if in_percent(metric) else ""
        yield (
            f"Its {quantity_of(metric)} on the test examples is"
            f" {shown(first['test'], metric)}{unit}, the mean of {seeds} seeds"
            f"{advice['interval']}."
        )
    groups: dict[str, list[str]] = {"better": [], "worse": [], "undecided": []}
    cheaper: list[str] = []
    for row in others:
        side = "undecided"
        if row.get("established"):
            side = "better" if row["gain"] > 0 else "worse"
        groups[side].append(f"{row['method']} ({row['text']})")
        # A method is cheaper if it has fewer bytes or exchanges, and not more of both.
        costs = [(row[key], first[key]) for key in ("bytes", "exchanges")]
        less = all(own <= best for own, best in costs) and any(a < b for a, b in costs)
        if less and side != "better":
            cheaper.append(_cost_text(row))
    texts = {side: " and ".join(found) for side, found in groups.items() if found}
    on_tests = "on the test examples"
    if "better" in texts:
        yield f"It is better than {texts['better']}, {on_tests}."
    if "worse" in texts:
        yield f"But {on_tests} it is worse than {texts['worse']}: prefer that method."
    if "undecided" in texts:
        yield f"No difference from {texts['undecided']} is established {on_tests}."
    if cheaper:
        yield (
            "If the difference does not matter to you, take a cheaper method:"
            f" {'; '.join(cheaper)}, instead of {_cost_text(first)}."
        )
    if advice["alone"].get("sites"):
        yield (
            f"On the test examples of each site, {advice['federated']} compared with"
            f" training alone is {_worth(advice)} of"
            f" {len(advice['alone']['sites'])} sites."
        )
        if not metric.startswith("personal"):
            yield (
                "The ranking compares single models for all sites. Training alone makes a"
                " model for each site and is not in the ranking."
            )


def _cost_text(row: Mapping[str, Any]) -> str:
    mebibytes = row["bytes"] / 2**20
    return (
        f"{row['method']} with {mebibytes:.2f} MiB and {row['exchanges']:g} exchanges"
    )


def _worth(advice: Mapping[str, Any]) -> str:
    """Return the names of the sites with a better, a worse or an unclear result."""
    sign = 1 if higher_is_better(advice["metric"]) else -1
    found: dict[str, list[str]] = {
        side: [] for side in ("better", "worse", "not clearly different", "not known")
    }
    for row in advice["alone"]["sites"]:
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
