"""``fedbn-flwr advise`` looks at the sites, tries methods, and gives an answer.

1. Look: a few rounds of FedAvg with BatchNorm, and the doctor's findings about them.
2. Try: short runs of all candidates with at least three learning rates each. The better
   half continues with longer runs. The scores come from validation examples.
3. Answer: the best two methods, FedAvg and training alone as whole runs with three
   seeds.

All runs are in one folder. After a kill, the same call does only the missing runs and
gives the same answer.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError, RunFailedError
from fedbn_flwr.lab.advice.candidates import (
    ALONE,
    FEDAVG,
    Candidate,
    Settings,
    candidates,
    shared_settings,
)
from fedbn_flwr.lab.advice.halving import (
    SEEDS,
    Point,
    affordable,
    cost,
    finalists,
    halve,
    of_length,
    score_of,
)
from fedbn_flwr.lab.answer import shown
from fedbn_flwr.lab.config import Config, Scalar
from fedbn_flwr.lab.doctor import diagnose_run
from fedbn_flwr.lab.files import ADVICE_FILE, STUDY_FILE, read_metrics, site_label
from fedbn_flwr.lab.output.folder import lock_folder, writing
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.lab.references import site_rows
from fedbn_flwr.lab.run_files import RunFiles
from fedbn_flwr.lab.studies.one_run import do_cell, is_done
from fedbn_flwr.lab.studies.parallel import default_parallel, in_parallel
from fedbn_flwr.lab.studies.results import half_interval
from fedbn_flwr.lab.studies.study import Cell, Study
from fedbn_flwr.lab.studies.sweep import (
    Follower,
    LogFollower,
    check_data,
    do_all,
    in_series,
    sweep,
)
from fedbn_flwr.training.tasks import higher_is_better, in_percent, quantity_of

logger = logging.getLogger("flwr")

RECOMMENDED_FILE = "recommended.yaml"
_LOOK_ROUNDS = 5
_VALIDATION = 0.2  # share of the training examples, unless the config has one
_AGAIN = "give the same command again"
Named = Callable[..., Any]


def advise(
    given: Mapping[str, Scalar | Named],
    out: Path,
    *,
    rounds: int | None = None,
    hours: float | None = None,
    metric: str = "",
    methods: Sequence[str] = (),
    rates: Sequence[float] = (),
    parallel: int | None = None,
    follower: Follower | None = None,
    say: Callable[[str], None] = logger.info,
) -> dict[str, Any]:
    """Try methods on the user's sites and return the advice.

    Args:
        given: settings of a run, as in a config file. ``model`` and ``dataset`` may be
            functions of a module: ``advise({"model": net, "dataset": patients}, out)``.
        out: the folder of all runs. ``advice.json`` has the returned content,
            ``recommended.yaml`` the config of the recommended method, and
            ``fedbn-flwr report`` makes the page.
        rounds: the most rounds of all runs together; by default, what whole runs of
            ``num-server-rounds`` need.
        hours: the same as hours of this machine, estimated from the first rounds.
        metric: the metric that compares the methods; by default the metric of the task.
        methods: methods to try in addition to the references, such as "fixbn". By default,
            the doctor and the situation suggest them.
        rates: the learning rates to try; by default 0.3, 1 and 3 times the config's.
        parallel: runs at a time; by default, the fastest number.
        follower: observes the runs.
        say: receives the findings and the plan as text, before the trials.

    Returns:
        The content of ``advice.json``. Scores are shares of 1. A difference is the
        score of the best method minus the score of another method.

    Raises:
        ConfigError: a setting is wrong, the budget is too small for one halving, or
            clients have no validation examples; no trial was done.
        RunFailedError: runs failed, or all trials of a length diverged.
    """
    if rounds and hours:
        raise ConfigError("--rounds and --hours are two budgets. Give one of them.")
    settings = {key: _by_name(key, value) for key, value in given.items()}
    if metric:
        others = str(settings.get("metrics", "")).split(",")
        settings["metrics"] = ",".join(dict.fromkeys([metric, *filter(None, others)]))
    config = Config.make(settings)
    full, seed = config.num_server_rounds, config.seed
    base: dict[str, Scalar] = {
        "eval-on": "personal-own",
        "validation-share": _VALIDATION,
        **shared_settings(settings),
    }
    base.pop("early-stopping", None)
    tried_rates = [*rates] or [
        float(f"{factor * config.learning_rate:.2g}") for factor in (0.3, 1, 3)
    ]
    if len({*tried_rates}) < 3:
        raise ConfigError(
            f"rates={tried_rates}: give at least three different learning rates."
        )
    follower = follower or LogFollower()

    with lock_folder(out, "study"):
        if (out / "config.yaml").exists():
            raise ConfigError(
                f"out={str(out)!r} is the folder of a run. Choose another folder."
            )
        # Look: a few rounds of FedAvg, and the doctor.
        look = _look(base, config, out)
        findings = diagnose_run(look.folder(out)).findings
        tried, left_out = candidates(settings, base, findings, methods)
        points = [Point(one, rate) for one in tried for rate in tried_rates]
        budget = rounds or cost(full, len(points))
        if hours:
            lines = read_metrics(look.folder(out) / "metrics.jsonl")[1:]
            one_round = statistics.fmean(line["seconds"] for line in lines)
            budget = int(hours * 3600 * (parallel or 1) / one_round)
        whole = affordable(budget, len(points), full)
        found = [" ".join([one.what, *one.evidence[:1]]) for one in findings]
        for text in (*found, *_plan(tried, left_out, tried_rates, whole, full)):
            say(text)

        # Try: trials on validation examples.
        def do(cells: Sequence[Cell]) -> None:
            check_data(cells)
            at_once = parallel or default_parallel(cells)
            runner = in_parallel(at_once) if at_once > 1 else in_series
            do_all(cells, out, runner, follower)

        rungs = halve(points, base, whole, full, seed, out, do)

    # Answer: whole runs with three seeds.
    last = finalists(rungs[-1], points[0].candidate.metric)
    study = Study(
        name=f"advice for {config.dataset}",
        base=of_length(base, whole, full),
        methods={p.candidate.name: of_length(p.settings, whole, full) for p in last},
        seeds=[seed + number for number in range(SEEDS)],
    )
    at_once = parallel or default_parallel([*study.cells()])
    # A final run that diverged has no score, and the others still give an answer.
    with suppress(RunFailedError):
        runner = in_parallel(at_once) if at_once > 1 else in_series
        sweep(study, out, runner, follower)
    advice = _answer(study, last, points[0].candidate.metric, out)
    advice |= {
        "found": found or ["The doctor found no fault in FedAvg with BatchNorm."],
        "candidates": [vars(one) for one in tried],
        "rates": tried_rates,
        "left-out": left_out,
        "trials": [
            {
                "rounds": rung.rounds,
                "scores": {
                    f"{point.candidate.name}, learning-rate={point.rate}": score
                    for point, score in rung.scores.items()
                },
            }
            for rung in rungs
        ],
        "conditions": [*_conditions(advice, tried_rates, whole, base, config)],
    }
    chosen = next(p for p in last if p.candidate.name == advice["best"])
    with writing(out, _AGAIN):
        text = _recommended(settings, chosen, advice["answer"])
        write_atomically(out / RECOMMENDED_FILE, text)
        write_atomically(out / ADVICE_FILE, json.dumps(advice, indent=2) + "\n")
    return advice


def _by_name(key: str, value: Scalar | Named) -> Scalar:
    """Return a setting. A function becomes the text ``module:function``.

    Raises:
        ConfigError: the function cannot be found by its name in its module.
    """
    if not callable(value):
        return value
    name = getattr(value, "__qualname__", "")
    if not name.isidentifier():
        raise ConfigError(
            f"{key}: {value!r} cannot be found by name. Pass a function that is defined"
            " at the top of a module."
        )
    return f"{value.__module__}:{name}"


def _look(base: Settings, config: Config, out: Path) -> Cell:
    """Do a few rounds of FedAvg with BatchNorm, unless they are done.

    Raises:
        ConfigError: data cannot be used, or no site has validation examples.
        RunFailedError: the run failed.
    """
    rounds = min(_LOOK_ROUNDS, config.num_server_rounds)
    shared = of_length(base, rounds, config.num_server_rounds)
    settings: Settings = {"strategy": "fedavg", "seed": config.seed}
    cell = Cell(FEDAVG, "look", config.seed, settings, shared)
    check_data([cell])
    split = partitioned_data(cell.config, count_clients(cell.config))
    if not any(map(len, split.validation)):
        raise ConfigError(
            f"validation-share={base['validation-share']} gives no site a validation"
            " example, and the method is chosen by them. Use a larger validation-share."
        )
    if not is_done(cell, out):
        error = do_cell(cell, out)
        if error:
            raise RunFailedError(f"the first rounds of FedAvg failed: {error}")
    return cell


def _plan(
    tried: Sequence[Candidate],
    left_out: Mapping[str, str],
    rates: Sequence[float],
    whole: int,
    full: int,
) -> list[str]:
    """Return the candidates with their reasons, and the size of the plan, as text."""
    lines = [f"Try {one.name}: {one.why}" for one in tried]
    lines += [f"Not tried: {name}: {why}" for name, why in left_out.items()]
    points = len(tried) * len(rates)
    lines.append(
        f"{points} trials with the rates {', '.join(map(str, rates))}, then whole runs of"
        f" {whole} of {full} rounds with {SEEDS} seeds: at most"
        f" {cost(whole, points):,} rounds together."
    )
    return lines


def _answer(
    study: Study, last: Sequence[Point], metric: str, out: Path
) -> dict[str, Any]:
    """Return the ranking of the final runs, the sites and the answer in sentences.

    Raises:
        RunFailedError: no method has a score with every seed.
    """
    runs: dict[str, list[RunFiles]] = {point.candidate.name: [] for point in last}
    scores: dict[str, dict[int, float | None]] = {}
    for cell in study.cells():
        if is_done(cell, out):
            runs[cell.method].append(RunFiles.read(cell.folder(out)))
            scores.setdefault(cell.method, {})[cell.seed] = score_of(cell, out)
    frame = pd.DataFrame(scores, index=study.seeds, dtype=float).dropna(axis="columns")
    points = {p.candidate.name: p for p in last if p.candidate.name in frame}
    ranked = [name for name, p in points.items() if p.candidate.metric == metric]
    if not ranked:
        raise RunFailedError(
            f"no method has a score with all of the seeds {study.seeds}, so there is no"
            f" advice. The results so far are in {out}."
        )

    # Rank by the mean score over the seeds, with paired differences from the best.
    means = frame[ranked].mean().sort_values(ascending=not higher_is_better(metric))
    best = str(means.index[0])
    ranking = []
    for name in (*means.index, *(points.keys() - {*ranked})):
        gap = frame[best] - frame[name]
        tests = pd.Series([run.final.get(run.headline) for run in runs[name]])
        compared = name in ranked and name != best
        ranking.append(
            {
                "method": name,
                "learning-rate": points[name].rate,
                "score": frame[name].mean(),
                "difference": gap.mean() if compared else None,
                "half": half_interval(gap) if compared else None,
                "test": None if tests.hasnans else tests.mean(),
                "bytes": statistics.fmean(_bytes(run.summary) for run in runs[name]),
                "seconds": statistics.fmean(
                    sum(line["seconds"] for line in run.lines) for run in runs[name]
                ),
            }
        )
    federated = next((row["method"] for row in ranking if row["method"] != ALONE), "")
    sites, unknown = _sites(runs[federated], runs.get(ALONE, ()))
    advice = {
        "metric": metric,
        "best": best,
        "federated": federated,
        "seeds": study.seeds,
        "ranking": ranking,
        "sites": sites,
    }
    return {**advice, "answer": [*_sentences(advice), *unknown]}


def _bytes(summary: Mapping[str, Any]) -> int:
    """Return the bytes of floats of a run, down and up."""
    ledger = summary["ledger"]
    return int(ledger.get("bytes-down", 0) + ledger.get("bytes-up", 0))


def _sites(
    federated: Sequence[RunFiles], alone: Sequence[RunFiles]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the difference from training alone at each site, or why it is unknown.

    Difference and interval are means over the seeds. The interval covers other test
    examples of the site.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for run, other in zip(federated, alone, strict=False):
        rows, unknown = site_rows(run, other)
        if unknown:
            return [], [unknown]
        for row in rows:
            found.setdefault(site_label(row), []).append(row)
    keys = ("difference", "difference-low", "difference-high")
    sites: list[dict[str, Any]] = []
    for site, of_seeds in found.items():
        # A metric may be undefined at a site: AUROC needs two classes.
        frame = pd.DataFrame(of_seeds, columns=keys, dtype=float)
        values = frame.mean(skipna=False)
        known = {key: None if pd.isna(values[key]) else values[key] for key in keys}
        sites.append({"site": site, **known})
    return sites, []


def _sentences(advice: Mapping[str, Any]) -> Iterator[str]:
    """Yield the answer in plain words."""
    metric = advice["metric"]
    quantity, sign = quantity_of(metric), 1 if higher_is_better(metric) else -1
    unit = " %" if in_percent(metric) else ""
    first, *others = advice["ranking"]
    if advice["best"] == ALONE:
        yield "Train each site alone: no federated method was better."
    else:
        yield f"Use {first['method']} with learning-rate={first['learning-rate']}."
    text = (
        f"Its {quantity} on the validation examples is"
        f" {shown(first['score'], metric)}{unit}, the mean of"
        f" {len(advice['seeds'])} seeds"
    )
    if first["test"] is not None:
        text += f"; on the test examples it is {shown(first['test'], metric)}{unit}"
    yield f"{text}."
    for row in others:
        if row["half"] is None:
            continue
        gap, half = row["difference"], row["half"]
        interval = (
            f"{shown(gap - half, metric, '+')} to {shown(gap + half, metric, '+')}"
        )
        if abs(gap) > half:
            yield (
                f"It is better than {row['method']} by {shown(abs(gap), metric)}"
                f" (95 % interval of the difference {interval})."
            )
        else:
            yield (
                f"No difference from {row['method']} is established"
                f" ({shown(gap, metric, '+')}, 95 % interval {interval})."
            )
    worth: dict[str, list[str]] = {
        side: [] for side in ("better", "worse", "not clearly different", "not known")
    }
    for row in advice["sites"]:
        side = "not known"
        if row["difference-low"] is not None:
            ends = (sign * row["difference-low"], sign * row["difference-high"])
            side = "not clearly different"
            if min(ends) > 0 or max(ends) < 0:
                side = "better" if min(ends) > 0 else "worse"
        worth[side].append(row["site"])
    if advice["sites"]:
        parts = []
        for side, names in worth.items():
            few = f" ({', '.join(names)})" if len(names) < 5 else ""
            if names:
                parts.append(f"{side} at {len(names)}{few}")
        yield (
            f"On the test examples of each site, {advice['federated']} compared with"
            f" training alone is {', '.join(parts)} of {len(advice['sites'])} sites."
        )


def _conditions(
    advice: Mapping[str, Any],
    rates: Sequence[float],
    whole: int,
    base: Settings,
    config: Config,
) -> Iterator[str]:
    """Yield the conditions that could change the answer."""
    for row in advice["ranking"]:
        if row["learning-rate"] in (min(rates), max(rates)):
            yield (
                f"The best rate of {row['method']}, {row['learning-rate']}, is at the end"
                " of the tried rates. Try further --rates."
            )
    if whole < config.num_server_rounds:
        yield (
            f"The final runs had {whole} of {config.num_server_rounds} rounds, because of"
            " the budget. Slow methods may gain from more rounds."
        )
    undecided = [
        row["method"]
        for row in advice["ranking"]
        if row["half"] is not None and not abs(row["difference"]) > row["half"]
    ]
    if undecided:
        yield (
            f"More seeds may decide between {advice['best']} and {', '.join(undecided)}:"
            f" add seeds to {STUDY_FILE} and sweep it into the same folder."
        )
    if str(base["eval-on"]).startswith("personal"):
        yield (
            "Each site was tested on its own examples. If you need one model for all"
            " sites, set eval-on=global and ask again."
        )
    yield (
        f"The sites kept {100 * float(base['validation-share']):g} % of their training"
        " examples to choose the method. The recommended config trains as your config"
        " says."
    )


def _recommended(settings: Settings, chosen: Point, answer: Sequence[str]) -> str:
    """Return the config file of the recommended method."""
    own = {**chosen.settings}
    if "eval-on" in settings or not own.get("eval-on"):
        own.pop("eval-on", None)
    base = {**shared_settings(settings), "seed": settings.get("seed", 0)}
    _, dropped = Config.make_of_shared(base, own)
    values = {key: value for key, value in base.items() if key not in dropped} | own
    comment = "".join(f"# {sentence}\n" for sentence in answer)
    return comment + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
