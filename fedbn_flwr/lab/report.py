"""The command ``fedbn-flwr report``, for one HTML page of a run or a study.

The page is the template ``report.html`` with the style ``report.css`` and loads no other
file. The template has the words and the order: findings about BatchNorm, the verdict,
the sites, the rounds and the cost. This module has the numbers and the pictures. The
page of an unfinished run shows its present state. Runs are compared by a study, or by
``fedbn-flwr evaluate RUN --against RUN2``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError, FedBNError
from fedbn_flwr.lab import report_pictures as pictures
from fedbn_flwr.lab.answer import directed, of_mean, shown, template
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.files import (
    CONFIG_FILE,
    STUDY_FILE,
    ledger_of,
    read_json,
    refuse_no_results,
    site_label,
    trained,
)
from fedbn_flwr.lab.output.folder import DIVERGED_AT
from fedbn_flwr.lab.output.intervals import (
    Comparison,
    Interval,
    difference,
    mean,
    mismatch,
    over_seeds,
    sites_of_run,
    tests_of,
)
from fedbn_flwr.lab.run_files import TESTS, RunFiles, run_warnings
from fedbn_flwr.lab.studies.one_run import failure_of, is_done, of_study, summary_of
from fedbn_flwr.lab.studies.results import rows_of, table
from fedbn_flwr.lab.studies.study import Study
from fedbn_flwr.training.tasks import higher_is_better, in_percent, quantity_of

REPORT_FILE = "report.html"
_GENERATOR = '<meta name="generator" content="fedbn-flwr report">'
_SHOWN = 20
"""The most sites in a picture; the table has all of them."""


def write_report(
    folder: Path,
    out: Path | None = None,
    reload_after: int = 0,
) -> Path:
    """Write the report of a run or a study in its present state, and return the file.

    Args:
        folder: the folder of a run or a study, finished or not.
        out: the file; by default, ``report.html`` in the folder. An older report is
            replaced.
        reload_after: the seconds after which a browser loads the page again; 0 if it
            does not.

    Raises:
        ConfigError: the folder is neither, the file is not a report, or it cannot be
            written.
    """
    # Another file of this name must not be replaced.
    target = out or folder / REPORT_FILE
    is_file = target.is_file() and _GENERATOR not in target.read_text(errors="replace")
    if is_file or target.is_dir():
        raise ConfigError(
            f"out={str(target)!r} is there and is not a report. Choose another file."
        )

    # The style is in the page, because a report is sent as one file.
    here = Path(__file__).parent
    page: dict[str, Any] = {
        "style": Markup((here / "report.css").read_text(encoding="utf-8")),
        "generator": Markup(_GENERATOR),
        "reload_after": reload_after,
        "version": version("fedbn-flwr"),
        "now": datetime.now(),
    }
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if (folder / STUDY_FILE).is_file():
            page |= _study_page(folder, target)
        else:
            refuse_no_results(folder)
            page |= _run_page(RunFiles.read(folder))
        write_atomically(target, template(here / "report.html").render(page))
    except OSError as error:
        raise ConfigError(f"out={str(target)!r} cannot be written: {error}") from error
    return target


def _run_page(run: RunFiles) -> dict[str, Any]:
    """Return the contents of the page of a run."""
    rows = {row["site"]: row for row in run.sites()} if run.has_model else {}
    found, warnings = None, [*run_warnings(run)]
    if run.summary.get("sites") and run.has_model:
        try:
            found = sites_of_run(run.folder)
        except FedBNError as error:
            warnings.append(f"The sites have no intervals: {error}")
        else:
            for row in found.rows:
                known = rows.setdefault(row["site"], {"metrics": {}, "rounds": 0})
                known.update(row)
    diagnosis = read_json(run.folder / "doctor.json")
    fields = {field.alias: field for field in Config.model_fields.values()}
    settings = run.config.to_mapping().items()
    sites, metric = list(rows.values()), quantity_of(run.headline)
    return {
        "title": f"{run.title} on {run.config.dataset}",
        "run": run,
        "metric": metric,
        "num_sites": len(trained(run.sites())),
        "tests": TESTS,
        "sites": sites,
        "columns": dict.fromkeys(itertools.chain(*(row["metrics"] for row in sites))),
        "verdict": _verdict_of_run(run, found),
        "mismatch": mismatch(run.folder) if run.has_model else "",
        "warnings": warnings,
        "pictures": [*_main_pictures(run, sites)],
        "cards": diagnosis.get("findings", ()) if run.has_model else (),
        "compared": diagnosis.get("measures", {}).get("sites", ()),
        "notes": [*diagnosis.get("not-measured", ()), *diagnosis.get("notes", ())],
        "totals": run.summary.get("ledger") or ledger_of(run.lines),
        "seconds": sum(line["seconds"] for line in run.lines),
        "settings": [
            (key, value, fields[key].description)
            for key, value in settings
            if value != fields[key].default
        ],
    }


def _verdict_of_run(run: RunFiles, found: Comparison | None) -> str:
    """Return the result of a run in a sentence."""
    metric, value = quantity_of(run.headline), run.final.get(run.headline)
    if run.diverged_at and not run.has_model:
        return (
            f"No usable model: diverged in round {run.diverged_at}: {run.divergence}."
        )
    if not run.lines and not run.summary:
        return "No round is finished yet."
    if value is None:
        return f"No round has a test with {metric}, so the page has no result."
    # If the main test is that of the sites, its mean has an interval.
    own = run.headline.startswith("personal-own")
    if found and own and found.mean.value is not None and not found.left_out:
        return of_mean(found, metric)
    unit = " %" if in_percent(metric) else ""
    what = "Mean test" if run.headline.startswith("personal") else "Test"
    text = f"{what} {directed(metric)} after round {run.final.get('round', '?')}:"
    text = f"{text} {shown(value, metric)}{unit}."
    return f"{text} {of_mean(found, metric)}" if found and found.sites else text


def _main_pictures(run: RunFiles, sites: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the pictures of the sites and of the rounds."""
    if not run.has_model:
        return
    metric = quantity_of(run.headline)
    known = [row for row in sites if row.get("value") is not None]
    caption = f"Sites: test {directed(metric)}"
    if any(row.get("low") is not None for row in known):
        caption += " with the 95 % interval over the test examples"
    if len(known) > _SHOWN:
        known.sort(key=lambda row: row["value"])
        known = known[: _SHOWN // 2] + known[-_SHOWN // 2 :]
        caption += f", the {_SHOWN // 2} lowest and highest of {len(sites)} sites"
    points: dict[str, dict[str, Any]] = {}
    for row in known:
        name = f"{pictures.short(site_label(row))} n={row['examples']}"
        points[name] = {key: row.get(key) for key in ("value", "low", "high")}
    if points:
        frame = pd.DataFrame.from_dict(points, orient="index", dtype=float)
        yield pictures.rows(frame, metric, f"{caption}.")

    whole = {"this run": run.curve(run.headline)}
    thin: dict[str, pictures.Curve] = {}
    if run.headline.startswith("personal-own"):
        own = run.own_tests
        own = own[(own["metric"] == metric) & own["value"].notna()]
        for name, tests in itertools.islice(own.groupby("site", sort=False), _SHOWN):
            thin[str(name)] = dict(zip(tests["round"], tests["value"], strict=True))
    if whole["this run"]:
        caption = f"Rounds: test {directed(metric)}"
        if thin:
            caption += "; thick line: mean of the sites, thin line: a site"
        marks = _phase_changes(run)
        caption = f"{caption}{_about(marks)}."
        yield pictures.curves(whole, metric, caption, thin=thin, marks=marks)


def _phase_changes(run: RunFiles) -> list[int]:
    """Return the rounds after which the phase changes, such as T* of FixBN."""
    return [
        one["round"]
        for one, after in itertools.pairwise(run.lines)
        if one.get("phase") != after.get("phase")
    ]


def _about(marks: Sequence[int]) -> str:
    """Return the words for the vertical lines of a picture."""
    rounds = ", ".join(map(str, marks))
    return (
        f"; dotted vertical line: the phase changes after round {rounds}"
        if marks
        else ""
    )


def _study_page(folder: Path, target: Path) -> dict[str, Any]:
    """Return the contents of the page of a study.

    The pictures for a paper are files beside the page ``target``.
    """
    study = Study.read(folder / STUDY_FILE)
    rows = rows_of(study, folder)
    states: dict[str, list[str]] = {"diverged": [], "failed": [], "not finished": []}
    failures = []
    # Use the begun runs of this study, since another study's may be in the folder.
    runs: dict[str, dict[str, list[RunFiles]]] = {split: {} for split in study.splits}
    cells = list(study.cells())
    for cell in cells:
        out = cell.folder(folder)
        failure = failure_of(cell, folder)
        if failure:
            failures.append((cell.name, failure["error"]))
        if not is_done(cell, folder):
            states["failed" if failure else "not finished"].append(cell.name)
        elif DIVERGED_AT in summary_of(out):
            # A diverged run has no place in a mean.
            states["diverged"].append(cell.name)
            continue
        if (out / CONFIG_FILE).is_file() and of_study(cell, folder):
            runs[cell.split].setdefault(cell.method, []).append(RunFiles.read(out))
    drawn: list[str] = []
    verdicts = {}
    mismatches: dict[str, str] = {}
    numbers = {pictures.short(name): at for at, name in enumerate(study.methods)}
    alone = [
        name
        for name, own in study.methods.items()
        if own.get("strategy") == "standalone"
    ]
    for split, of_split in runs.items():
        where = f", {split}" if len(runs) > 1 else ""
        found = [*itertools.chain(*of_split.values())]
        if not found:
            continue
        # Other metrics have other axes.
        metric = quantity_of(found[0].headline)
        same = {
            method: [run for run in own if quantity_of(run.headline) == metric]
            for method, own in of_split.items()
        }
        finals = _finals(same)
        faults = {
            name: text
            for name, of in same.items()
            for run in of
            if (text := mismatch(run.folder))
        }
        mismatches |= {f"{name}{where}": text for name, text in faults.items()}
        name = re.sub(r"[^A-Za-z0-9._+=-]", "_", split) if len(runs) > 1 else ""
        file = target.with_name(f"{target.stem}{name and '-'}{name}")
        drawn += _study_pictures(same, finals, metric, where, numbers, file)
        if finals.count().any():
            verdicts[split] = _verdict(same, finals, metric, alone)
    results = table(rows)
    constant = [
        name
        for name in results.columns.difference(["method", "final", "p"], sort=False)
        if len(results) > 1 and results[name].nunique() == 1
    ]
    tuning = folder / "tuning.md"
    return {
        "title": study.name,
        "counts": {"methods": study.methods, "splits": study.splits, "runs": cells},
        "states": states,
        "files": target.stem,
        "failures": failures,
        "pictures": drawn,
        "verdicts": verdicts,
        "mismatches": mismatches,
        "folder": folder,
        "constant": results[constant].head(1).to_dict("list"),
        "results": results.drop(columns=constant).to_dict("split"),
        "tuning": tuning.read_text(encoding="utf-8") if tuning.is_file() else "",
        "study": (folder / STUDY_FILE).read_text(encoding="utf-8"),
    }


def _finals(runs: Mapping[str, Sequence[RunFiles]]) -> pd.DataFrame:
    """Return the final main metric of the finished runs, by seed and method."""
    found = {}
    for method, of_seeds in runs.items():
        ended = [run for run in of_seeds if run.summary]
        found[method] = {run.config.seed: run.final.get(run.headline) for run in ended}
    return pd.DataFrame(found, dtype=float)


def _verdict(
    runs: Mapping[str, Sequence[RunFiles]],
    finals: pd.DataFrame,
    metric: str,
    alone: Sequence[str],
) -> dict[str, Any]:
    """Return the best method, and its gaps to the second and to training alone.

    ``sites`` has the difference from training alone by site.
    """
    rising = higher_is_better(metric)
    means = finals.mean().dropna().sort_values(ascending=not rising)
    best, *others = means.index
    pairs = math.comb(len(means), 2)
    gaps, sites = {}, {}
    for other in others:
        if other in (others[0], *alone):
            gap, by_site = _gap(runs[best], runs[other])
            # The best method is known only after the comparison of all pairs.
            gaps[other] = (gap, gap.ends(pairs), gap.side(pairs))
            if other in alone:
                sites = {
                    name: (one, one.ends(len(by_site)), one.side(len(by_site)))
                    for name, one in by_site.items()
                }
    shown = {"best": best, "mean": means[best], "metric": metric, "gaps": gaps}
    return {**shown, "sites": sites, "sign": 1 if rising else -1}


def _gap(
    runs: Sequence[RunFiles], others: Sequence[RunFiles]
) -> tuple[Interval, dict[str, Interval]]:
    """Return the mean difference of two methods over the seeds, also by site."""
    other_of = {run.config.seed: run for run in others if run.summary}
    means, by_site = [], dict[str, list[Interval]]()
    for run in runs:
        other = other_of.get(run.config.seed)
        if other is None or not run.summary:
            continue
        mine, theirs = (one.final.get(one.headline) for one in (run, other))
        if mine is None or theirs is None:
            continue
        plain = Interval(float(mine) - float(theirs))
        # Without single predictions, the interval covers seeds alone.
        with suppress(FedBNError):
            pairs = [tests_of(one.folder) for one in (run, other)]
            gaps = {}
            for name in pairs[0].keys() & pairs[1].keys():
                one, two = (tests[name] for tests in pairs)
                if one.client is not None and one.groups and one.fits(two):
                    gaps[one.name] = difference(one, two)
            own = all(one.headline.startswith("personal-own") for one in (run, other))
            error = mean(gaps.values())
            if own and error.error is not None:
                plain = plain._replace(error=error.error, freedom=error.freedom)
            for name, gap in gaps.items():
                by_site.setdefault(name, []).append(gap)
        means.append(plain)
    found = {name: over_seeds(gaps) for name, gaps in sorted(by_site.items())}
    return over_seeds(means), found


def _study_pictures(
    runs: Mapping[str, Sequence[RunFiles]],
    finals: pd.DataFrame,
    metric: str,
    where: str,
    numbers: Mapping[str, int],
    file: Path,
) -> Iterator[str]:
    """Yield the final main metric of each method, and the curves of the best three."""
    found = {}
    for method, values in finals.items():
        number = over_seeds([Interval(value) for value in values.dropna()])
        found[method] = (number.value, *number.ends())
    points = pd.DataFrame.from_dict(
        found, orient="index", columns=["mean", "low", "high"], dtype=float
    )
    points = points.dropna(subset="mean").rename(index=pictures.short)
    if in_percent(metric):
        points = points.clip(0, 1)
    if len(points):
        caption = f"Final {directed(metric)}{where}: mean and 95 % interval over seeds."
        final = file.with_name(f"{file.name}-final")
        yield pictures.rows(points, metric, caption, numbers, final)
    curves = {}
    for method, of_seeds in runs.items():
        frame = pd.DataFrame([run.curve(run.headline) for run in of_seeds])
        if not frame.empty:
            curves[method] = frame.sort_index(axis="columns")
    means = {method: frame.mean() for method, frame in curves.items()}
    rising = higher_is_better(metric)
    best = sorted(means, key=lambda name: means[name].iloc[-1], reverse=rising)[:3]
    if best:
        caption = (
            f"The best {len(best)}{where}: mean over the seeds, lowest to highest."
        )
        bands = {name: (curves[name].min(), curves[name].max()) for name in best}
        top = {name: means[name] for name in best}
        rounds = file.with_name(f"{file.name}-rounds")
        about: dict[str, Any] = {"bands": bands, "numbers": numbers, "file": rounds}
        yield pictures.curves(top, metric, caption, **about)
