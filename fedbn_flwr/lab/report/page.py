"""The command ``fedbn-flwr report``, for one HTML page of a run or a study.

The page is the template ``report.html`` with the style ``report.css`` and loads no other
file. A page has this order: one sentence with the result, the findings about BatchNorm,
the sites, the rounds and the cost. The template has the headings and the order, this
module the texts. The numbers come from ``results.sites`` and ``results.ranking``; curves
are of the lines of the rounds.
Runs are compared by a study, or by ``fedbn-flwr evaluate RUN --against RUN2``.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError, FedBNError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.report import pictures
from fedbn_flwr.lab.report.words import (
    ends,
    of_mean,
    of_ranking,
    template,
    word,
)
from fedbn_flwr.lab.results.files import (
    CONFIG_FILE,
    STUDY_FILE,
    command,
    ledger_of,
    read_json,
    refuse_no_results,
    site_label,
)
from fedbn_flwr.lab.results.numbers import directed, label_of, shown, with_unit
from fedbn_flwr.lab.results.ranking import (
    Ranking,
    Result,
    Results,
    remarks,
)
from fedbn_flwr.lab.results.run_files import RunFiles, run_warnings
from fedbn_flwr.lab.results.sites import (
    CLASSES,
    Comparison,
    best_before_end,
    last_tests,
    sites_of_run,
)
from fedbn_flwr.lab.results.tests_table import HELD_OUT
from fedbn_flwr.lab.studies.one_run import failure_of, is_done
from fedbn_flwr.lab.studies.study import Study
from fedbn_flwr.lab.studies.tables import answers, marked, outcomes, rows_of
from fedbn_flwr.lab.studies.tuning import tuned
from fedbn_flwr.messages.site_names import with_name

REPORT_FILE = "report.html"
_SHOWN = 20
"""The most sites in a picture; the table has all of them."""
_LONG = 30
"""The most rows of a list that is not folded."""


def write_report(folder: Path) -> Path:
    """Write ``report.html`` about a run or a study, finished or not, and return it.

    Raises:
        ConfigError: the folder is neither, or the file cannot be written.
    """
    target = folder / REPORT_FILE
    page: dict[str, Any] = {
        "made": f"{version('fedbn-flwr')} on {datetime.now():%Y-%m-%d at %H:%M:%S}",
    }
    try:
        if (folder / STUDY_FILE).is_file():
            page |= _study_page(folder)
        else:
            refuse_no_results(folder)
            page |= _run_page(RunFiles.read(folder))
        write_atomically(target, template(REPORT_FILE).render(page))
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}") from error
    return target


def _run_page(run: RunFiles) -> dict[str, Any]:
    """Return the contents of the page of a run."""
    found, warnings = None, [*run_warnings(run)]
    if run.summary.get("sites") and run.has_model:
        try:
            found = sites_of_run(run.folder)
        except FedBNError as error:
            warnings.append(f"The sites have no intervals: {error}")
    rows = _sites(run, found) if run.has_model else []
    diagnosis = read_json(run.folder / "doctor.json")
    findings = [*diagnosis.get("findings", ())] if run.has_model else []
    missing = [
        (site, f"{rounds[0]} to {rounds[-1]} ({len(rounds)})", reason)
        for (site, reason), rounds in run.missing().items()
    ]
    return {
        "title": f"{run.title} on {run.config.dataset}",
        "sub": _about_run(run, rows),
        "warnings": filter(None, warnings),
        "answers": [_verdict_of_run(run, found)],
        "bad": bool(run.diverged_at),
        "guarantee": run.summary.get("privacy", {}).get("guarantee", ""),
        "findings": findings,
        "odd_sites": _sites_that_differ(diagnosis, rows),
        "sites": _table_of_sites(run, rows),
        "fold_sites": len(rows) > _LONG,
        "missing": missing[:_LONG],
        "pictures": [*_pictures_of_run(run, rows)],
        "cost": _cost(run),
        "notes": [*diagnosis.get("not-measured", ()), *diagnosis.get("notes", ())],
        "settings": _settings(run.config),
        "versions": _versions(run.summary),
        "compare": command("evaluate", run.folder, "--against", "RUN2"),
        "which": command(*_which_method(run)),
        "again": command(
            "run", run.folder / CONFIG_FILE, "--out", f"{run.folder}-again"
        ),
    }


def _which_method(run: RunFiles) -> Iterator[object]:
    """Yield the words of the study of methods on the data and the model of a run."""
    yield from ("sweep", "which-method", "--out", f"{run.folder}-which")
    keys = {"model", *Config.keys("data"), *Config.keys("clients")}
    for key, value, _ in _settings(run.config):
        if key in keys:
            yield from ("--set", f"{key}={value}")


def _about_run(run: RunFiles, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the line below the title of a run."""
    state = "finished" if run.summary else "running" if run.running else "not finished"
    state = "diverged" if run.diverged_at else state
    trained = [row for row in rows if HELD_OUT not in row]
    sites = f"{len(trained) or run.config.num_clients} sites"
    if run.config.fraction_train < 1 and run.lines:
        sites = f"{len(run.lines[0]['participants'])} of {sites} a round"
    return (
        f"{run.done} of {run.config.num_server_rounds} rounds, {state}. Model"
        f" `{run.config.model}`, {sites}, seed {run.config.seed}."
    )


def _sites(run: RunFiles, found: Comparison | None) -> list[dict[str, Any]]:
    """Return a row for each site with its interval, its metrics and its rounds."""
    metric = run.metric
    known = found.rows if found else run.summary.get("sites", ())
    rows = {row["site"]: row for row in known}
    # With early stopping, the result is not that of the last round.
    upto = run.final.get("round", math.inf)
    for row in last_tests(run.folder, run.tested, upto):
        value = row["metrics"].get(metric)
        rows[row["site"]] = row | {"value": value} | rows.get(row["site"], {})
    took_part: Counter[int] = Counter()
    for line in run.lines:
        took_part.update(line.get("participants", ()))
    for row in rows.values():
        row["rounds"] = took_part[row.get("client", -1)]
    return [*rows.values()]


def _sites_that_differ(
    diagnosis: Mapping[str, Any], sites: Sequence[Mapping[str, Any]]
) -> list[list[Any]]:
    """Return a row for each site that the doctor found to differ from the others."""
    names = {
        with_name(row.get("client", ""), row["site"]): row["site"] for row in sites
    }
    rows = []
    for one in diagnosis.get("measures", {}).get("sites", ()):
        words = [
            one[f"{what}_in_words"] if one[f"other_{what}"] else "as the others"
            for what in ("labels", "inputs")
        ]
        if one["other_labels"] or one["other_inputs"] or one["damage"]:
            name = names.get(one["client"], f"client {one['client']}")
            rows.append([name, one["examples"], *words, " ".join(one["damage"])])
    return rows


def _table_of_sites(run: RunFiles, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the head and the cells of the table of sites."""
    metric = run.metric
    metrics = dict.fromkeys(itertools.chain(*(row.get("metrics", ()) for row in rows)))
    others = [run.named(name) for name in metrics if name != metric]
    figures = dict.fromkeys(itertools.chain(*(row.get(CLASSES, ()) for row in rows)))
    shares = [one for one in figures if one not in (*metrics, metric, "reversed")]
    head = ["site", label_of(metric), *map(label_of, others)]
    head += [*(f"{one}, %" for one in shares), "examples", "rounds"]
    cells = []
    for row in rows:
        value = row.get("error") or shown(row.get("value"), metric)
        if row.get("low") is not None:
            value += f" ({shown(row['low'], metric)} to {shown(row['high'], metric)})"
        elif row.get("why"):
            value += f" (no interval: {row['why']})"
        more = [shown(row.get("metrics", {}).get(name), name) for name in others]
        more += [shown(row.get(CLASSES, {}).get(name), "accuracy") for name in shares]
        rounds = f"{row['rounds']} of {run.done}"
        cells.append([site_label(row), value, *more, row["examples"], rounds])
    upto = run.final.get("round", run.done)
    origin = (
        f"All columns: the last test of each site up to round {upto} (`tests.csv`)."
    )
    if any("groups" in row for row in rows):
        origin = (
            f"{label_of(metric)}: the final models, from their single predictions"
            f" (`predictions.csv`). Other columns: the last tests up to round {upto}, as in"
            " the curve of the rounds (`tests.csv`)."
        )
    return {"head": head, "rows": cells, "origin": origin}


def _verdict_of_run(run: RunFiles, found: Comparison | None) -> str:
    """Return the result of a run in a sentence."""
    metric, value = run.metric, run.final.get(run.headline)
    if run.diverged_at and not run.has_model:
        return (
            f"No usable model: diverged in round {run.diverged_at}: {run.divergence}."
        )
    if not run.lines and not run.summary:
        return "No round is finished yet."
    if value is None:
        return f"No round has a test with {metric}, so the page has no result."
    seed = run.config.seed
    # If the main test is that of the sites, its mean has an interval.
    own = run.headline.startswith("personal-own")
    if found and own and found.mean.value is not None:
        return of_mean(found, metric, seed)
    what = "Mean test" if run.headline.startswith("personal") else "Test"
    text = f"{what} {directed(metric)} after round {run.final.get('round', '?')}:"
    text = f"{text} {with_unit(value, metric)}."
    return f"{text} {of_mean(found, metric, seed)}" if found and found.sites else text


def _cost(run: RunFiles) -> str:
    """Return the traffic and the time of a run."""
    totals = run.summary.get("ledger") or ledger_of(run.lines)
    moved = totals.get("bytes-down", 0) + totals.get("bytes-up", 0)
    seconds = sum(line["seconds"] for line in run.lines)
    return (
        f"{moved / 2**20:,.2f} MiB sent and received, a broadcast counted once;"
        f" {seconds:,.1f} s, exchanges: {totals.get('exchanges', 0):,}."
    )


def _settings(config: Config) -> list[tuple[Any, ...]]:
    """Return the settings that differ from the defaults, with their meanings."""
    fields = {field.alias: field for field in Config.model_fields.values()}
    return [
        (key, value, fields[key].description)
        for key, value in config.to_mapping().items()
        if value != fields[key].default
    ]


def _versions(summary: Mapping[str, Any]) -> str:
    """Return the hash of the final state, and the versions of the packages."""
    if not summary:
        return ""
    packages = ", ".join(f"{name} {one}" for name, one in summary["versions"].items())
    return f"SHA-256 of the final state: {summary['sha256']}. {packages}."


def _pictures_of_run(
    run: RunFiles, sites: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield the pictures of the sites and of the rounds."""
    if not run.has_model:
        return
    metric = run.metric
    known = [row for row in sites if row.get("value") is not None]
    caption = f"Sites: test {directed(metric)}"
    if any(row.get("low") is not None for row in known):
        caption += " with the 95 % interval over the test examples"
    if len(known) > _SHOWN:
        known.sort(key=lambda row: row["value"])
        known = known[: _SHOWN // 2] + known[-_SHOWN // 2 :]
        caption += f", the {_SHOWN // 2} lowest and highest of {len(sites)} sites"
    points: dict[str, pictures.Point] = {}
    short = pictures.short_names(map(site_label, known))
    for row in known:
        name = f"{short[site_label(row)]} n={row['examples']}"
        points[name] = row["value"], row.get("low"), row.get("high")
    if points:
        yield pictures.rows(points, metric, f"{caption}.")

    whole = run.curve(run.headline)
    if whole:
        caption = f"Rounds: test {directed(metric)}"
        if run.headline.startswith("personal-own"):
            caption += ", mean of the sites"
        yield pictures.curves({"this run": whole}, metric, f"{caption}.")


def _study_page(folder: Path) -> dict[str, Any]:
    """Return the contents of the page of a study."""
    study = Study.read(folder / STUDY_FILE)
    states: dict[str, list[str]] = {"failed": [], "not finished": []}
    failures = []
    cells = list(study.cells())
    for cell in cells:
        failure = failure_of(cell, folder)
        if failure:
            failures.append((cell.name, failure["error"]))
        if not is_done(cell, folder):
            states["failed" if failure else "not finished"].append(cell.name)
    found = outcomes(study, folder)
    drawn: list[str] = []
    sentences, sites = [], []
    steps: list[str] = []
    again: list[Any] = ["sweep", folder / STUDY_FILE, "--out", folder]
    warnings: list[str] = []
    try:
        trials, _ = tuned(study, folder)
        warnings += [f"{one.name}: {one.warning}." for one in trials if one.warning]
    # The scores of the trials depend on the task, and the data may be elsewhere.
    except FedBNError as error:
        warnings.append(f"The trials of tune were not read: {error}")
    for split, ranked in answers(study, found).items():
        where = f", {split}" if len(found) > 1 else ""
        prefix = f"{split}: " if where else ""
        sentences += [f"{prefix}{text}" for text in of_ranking(ranked)]
        sites += _sites_of_study(ranked, prefix)
        steps += _next_steps(ranked, prefix)
        if ranked.at_sites and "--set" not in again:
            again += ["--set", "eval-on=personal-own"]
        curves = {
            name: _curve(found[split][name], ranked.seeds) for name in ranked.means
        }
        warnings += _falling(curves, ranked.metric, found[split], prefix)
        drawn += _pictures_of_study(ranked, curves, where)
    # Methods with the same remark, such as on a small site, share a finding.
    faults: dict[str, list[str]] = {}
    for split, results in found.items():
        for method, of_method in results.items():
            place = f"{method}, {split}" if len(found) > 1 else method
            faults.setdefault(remarks(of_method), []).append(place)
    faults.pop("", None)
    if states["failed"] or states["not finished"]:
        steps = ["Do the runs that have no result."]
    return {
        "title": study.name,
        "sub": f"Methods: {len(study.methods)}, splits: {len(study.splits)}, runs:"
        f" {len(cells)}.",
        "warnings": [
            *(_left_out(state, names) for state, names in states.items() if names),
            *warnings,
        ],
        "answers": sentences or ["No seed has a result of every method yet."],
        "findings": [
            {"what": f"{'; '.join(names)}: {text}.", "evidence": (), "remedies": ()}
            for text, names in faults.items()
        ],
        "gaps": sites,
        "next_step": " ".join(steps),
        "command": command(*again),
        "pictures": drawn,
        # The findings have the remarks, once for all methods.
        "results": marked(study, rows_of(study, folder, found), found)
        .drop(columns="remarks", errors="ignore")
        .to_dict("split"),
        "failures": failures,
        "study": (folder / STUDY_FILE).read_text(encoding="utf-8"),
    }


def _next_steps(found: Ranking, prefix: str) -> Iterator[str]:
    """Yield what would decide the differences that are not established."""
    if found.at_sites:
        yield f"{prefix}Give every method the same test."
    if found.short:
        yield (
            f"{prefix}Collect more test examples at {', '.join(found.short)}, then repeat"
            f" the study: more seeds cannot decide whether {found.best} is better there."
        )
    needed = max(found.needed.values(), default=0)
    if needed:
        yield (
            f"{prefix}Use {needed} seeds in study.yaml, if the differences stay as they"
            " are. Finished runs are kept."
        )
    elif found.needed and len(found.seeds) == 1:
        yield f"{prefix}Add seeds to study.yaml. Finished runs are kept."
    elif found.needed and not found.short:
        yield f"{prefix}More seeds would not decide this study. It needs more test examples."


def _left_out(state: str, names: Sequence[str]) -> str:
    """Return a sentence on runs that are in no mean."""
    others = len(names) - _LONG
    text = ", ".join(names[:_LONG]) + (f" and {others} others" if others > 0 else "")
    return f"{state.capitalize()}, and left out of the means: {text}."


def _sites_of_study(found: Ranking, prefix: str) -> list[list[str]]:
    """Return a row for each site: whether the best method is better than alone."""
    rows = []
    for site, gap in found.sites.items():
        # As many numbers are compared as there are sites.
        of, metric = len(found.sites), found.metric
        rows.append(
            [
                f"{prefix}{site}",
                f"{found.best} is {word(gap, metric, of)}:"
                f" {shown(gap.value, metric, '+')} ({ends(gap, metric, '+', of)})",
            ]
        )
    return rows


def _curve(results: Mapping[int, Result], seeds: Sequence[int]) -> dict[int, float]:
    """Return the mean of the main metric over the seeds, for rounds of all of them."""
    runs = [RunFiles.read(results[seed].run) for seed in seeds]
    of_seeds = [run.curve(run.headline) for run in runs]
    means = pd.DataFrame(of_seeds).sort_index(axis="columns").mean(skipna=False)
    means = means.dropna()
    return {int(number): value for number, value in means.items()}


def _falling(
    curves: Mapping[str, Mapping[int, float]],
    metric: str,
    results: Results,
    prefix: str,
) -> Iterator[str]:
    """Yield a warning for each method that was better before its last round."""
    for name, curve in curves.items():
        best = best_before_end(curve, metric)
        run = next(iter(results[name].values())).run
        # With early stopping, a run returns its best round.
        if best is None or RunFiles.read(run).config.early_stopping:
            continue
        last = [*curve][-1]
        yield (
            f"{prefix}{name} was better in round {best} ({shown(curve[best], metric)})"
            f" than in its last round {last} ({shown(curve[last], metric)}). Set"
            " early-stopping for every method, or fewer rounds: this comparison is not"
            " fair to it."
        )


def _pictures_of_study(
    found: Ranking, curves: Mapping[str, Mapping[int, float]], where: str
) -> Iterator[str]:
    """Yield the final main metric of each method, and curves of the best and alone.

    Methods with different tests have different pictures, because no axis fits both.
    """
    metric, short = found.metric, pictures.short_names(found.means)
    others = [name for name in found.means if name not in found.at_sites]
    for names in filter(None, (found.at_sites, others)):
        means = {name: found.means[name] for name in names}
        points = {short[name]: (one.value, *one.ends()) for name, one in means.items()}
        tested = ""
        if found.at_sites:
            tested = " by site" if names is found.at_sites else " on all test examples"
        caption = f"Final {directed(metric)}{tested}{where}: mean and 95 % interval"
        yield pictures.rows(points, metric, f"{caption} over seeds.")
        best = [name for name in names if name in names[:3] or name == found.alone]
        caption = f"{', '.join(best)}{where}: mean over the seeds."
        yield pictures.curves({short[k]: curves[k] for k in best}, metric, caption)
