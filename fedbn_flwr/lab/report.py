"""The command ``fedbn-flwr report``, for one HTML page of a run or a study.

The page is the template ``report.html`` with the style ``report.css`` and loads no other
file. The template has the words and the order: the answer first, then the sites, the
rounds, the findings about BatchNorm, and everything else behind a click. This module
has the facts and the pictures. The page of an unfinished run shows its present state.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab import report_pictures as pictures
from fedbn_flwr.lab.answer import (
    ask_alone,
    directed,
    facts_of,
    next_step,
    odd_site,
    template,
)
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.files import (
    CONFIG_FILE,
    STUDY_FILE,
    read_json,
    refuse_no_results,
    site_label,
    trained,
)
from fedbn_flwr.lab.output.folder import DIVERGED_AT
from fedbn_flwr.lab.references import (
    ALONE,
    Comparison,
    compare,
    name_of,
    references_of,
    site_rows,
    with_alone,
)
from fedbn_flwr.lab.run_files import TESTS, RunFiles, run_warnings
from fedbn_flwr.lab.studies.one_run import failure_of, is_done, of_study, summary_of
from fedbn_flwr.lab.studies.results import half_interval, rows_of, table
from fedbn_flwr.lab.studies.study import Study
from fedbn_flwr.training.tasks import higher_is_better, in_percent, quantity_of

REPORT_FILE = "report.html"
_GENERATOR = '<meta name="generator" content="fedbn-flwr report">'
_DIFFER = ("", "label-", "excess-")
"""The result, the labels and the threshold: the numbers in which a site may differ."""
_COMPARED = 3
"""The most runs that a page compares with by itself."""
_SHOWN = 20
"""The most sites in a picture; the table has all of them."""


def write_report(
    folder: Path,
    out: Path | None = None,
    against: Sequence[Path] = (),
    reload_after: int = 0,
) -> Path:
    """Write the report of a run or a study in its present state, and return the file.

    Args:
        folder: the folder of a run or a study, finished or not.
        out: the file; by default, ``report.html`` in the folder. An older report is
            replaced.
        against: folders of runs to compare a run with. By default, these are the
            finished runs in the same parent folder or study with the same data, split,
            seed and test.
        reload_after: the seconds after which a browser loads the page again; 0 if it
            does not.

    Raises:
        ConfigError: the folder is neither, the file is not a report, it cannot be
            written, or a run of ``against`` cannot be compared.
    """
    # Another file of this name must not be replaced.
    target = out or folder / REPORT_FILE
    is_file = target.is_file() and _GENERATOR not in target.read_text(errors="replace")
    if is_file or target.is_dir():
        raise ConfigError(
            f"out={str(target)!r} is there and is not a report. Choose another file."
        )

    if (folder / STUDY_FILE).is_file() and against:
        raise ConfigError(f"{folder} is a study: --against compares two runs.")
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
            page |= _run_page(RunFiles.read(folder), against)
        write_atomically(target, template(here / "report.html").render(page))
    except OSError as error:
        raise ConfigError(f"out={str(target)!r} cannot be written: {error}") from error
    return target


def _run_page(run: RunFiles, against: Sequence[Path]) -> dict[str, Any]:
    """Return the contents of the page of a run."""
    references = references_of(run, against) if run.summary and run.has_model else []
    most = len(against) or _COMPARED
    others = ", ".join(name_of(one) for one in references[most:])
    references = references[:most]
    not_compared = others and (
        f"This page compares with {most} runs and leaves out {others}. Choose the runs by"
        " --against."
    )
    sites: Sequence[Mapping[str, Any]] = ()
    unknown = ""
    if run.has_model:
        sites, unknown = site_rows(run, references[0] if references else None)
    comparisons = []
    for reference in references:
        rows = sites
        if reference is not references[0]:
            rows, _ = site_rows(run, reference)
        comparison = compare(run, reference, rows, len(references))
        if comparison:
            comparisons.append(comparison)
    diagnosis = read_json(run.folder / "doctor.json")
    findings = diagnosis.get("findings", ()) if run.has_model else ()
    handled = diagnosis.get("notes", ())
    unmeasured = diagnosis.get("not-measured", ())
    _, _, why_unmeasured = next(iter(unmeasured), "").partition("everything, ")
    differ = [key for key in _DIFFER if any(f"{key}value" in row for row in sites)]
    fields = {field.alias: field for field in Config.model_fields.values()}
    settings = run.config.to_mapping().items()
    return {
        "title": f"{run.title} on {run.config.dataset}",
        "run": run,
        "metric": quantity_of(run.headline),
        "num_sites": len(trained(run.sites())),
        "tests": TESTS,
        "sites": sites,
        "columns": dict.fromkeys(itertools.chain(*(row["metrics"] for row in sites))),
        "comparisons": comparisons,
        "facts": facts_of(run, sites, comparisons),
        "odd": {key: odd_site(sites, key, len(differ)) for key in differ},
        "warnings": [*run_warnings(run), unknown, not_compared],
        "step": next_step(run, comparisons, findings),
        "suggested": "" if with_alone(comparisons) else ask_alone(run),
        "pictures": [*_main_pictures(run, sites, comparisons)],
        "cards": findings,
        "remedied": [note for note in handled if note.startswith("no finding")],
        "why_unmeasured": why_unmeasured.strip("."),
        "notes": [*unmeasured, *handled],
        "other_curves": [*_other_curves(run)],
        "settings": [
            (key, value, fields[key].description)
            for key, value in settings
            if value != fields[key].default
        ],
    }


def _main_pictures(
    run: RunFiles,
    sites: Sequence[Mapping[str, Any]],
    comparisons: Sequence[Comparison],
) -> Iterator[str]:
    """Yield the pictures of the sites and of the rounds, with the reference runs."""
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
        point = {"this run": row["value"], "low": row.get("low")}
        for one in comparisons:
            other = one.by_site.get(row["site"], {})
            point[name_of(one.reference)] = other.get("other")
        points[name] = {**point, "high": row.get("high")}
    if points:
        frame = pd.DataFrame.from_dict(points, orient="index", dtype=float)
        yield pictures.rows(frame, metric, f"{caption}.")

    shown = {"this run": run.curve(run.headline)}
    for one in comparisons:
        shown[name_of(one.reference)] = one.reference.curve(one.reference.headline)
    thin: dict[str, pictures.Curve] = {}
    if run.headline.startswith("personal-own"):
        own = run.own_tests
        own = own[(own["metric"] == metric) & own["value"].notna()]
        for name, tests in itertools.islice(own.groupby("site", sort=False), _SHOWN):
            thin[str(name)] = dict(zip(tests["round"], tests["value"], strict=True))
    if shown["this run"]:
        caption = f"Rounds: test {directed(metric)}"
        if thin:
            caption += "; thick line: mean of the sites, thin line: a site"
        marks = _phase_changes(run)
        caption = f"{caption}{_about(marks)}."
        yield pictures.curves(shown, metric, caption, thin=thin, marks=marks)


def _other_curves(run: RunFiles) -> Iterator[str]:
    """Yield a picture for each further quantity, the loss last."""
    # The tests of each quantity, in the order of the lines.
    curves: dict[str, dict[str, pictures.Curve]] = {}
    for key in dict.fromkeys(itertools.chain.from_iterable(run.lines)):
        # not a mean that another one repeats, or a list of values, one for each client
        repeats = key == run.headline or key.endswith(("-clients", "-weighted"))
        if key.startswith(TESTS) and not repeats and run.curve(key):
            quantity = quantity_of(key)
            test = key.removesuffix(f"-{quantity}")
            curves.setdefault(quantity, {})[test] = run.curve(key)
    for metric in sorted(curves, key=lambda name: (name == "loss", name)):
        marks = _phase_changes(run)
        caption = f"Other tests: {metric}{_about(marks)}."
        yield pictures.curves(curves[metric], metric, caption, marks=marks)


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
    numbers = {pictures.short(name): at for at, name in enumerate(study.methods)}
    alone = [
        name for name, own in study.methods.items() if own.get("strategy") == ALONE
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
        name = re.sub(r"[^A-Za-z0-9._+=-]", "_", split) if len(runs) > 1 else ""
        file = target.with_name(f"{target.stem}{name and '-'}{name}")
        drawn += _study_pictures(same, finals, metric, where, numbers, file)
        if finals.count().any():
            verdicts[split] = _verdict(finals, metric, alone)
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


def _verdict(finals: pd.DataFrame, metric: str, alone: Sequence[str]) -> dict[str, Any]:
    """Return the best method, and its gaps to the second and to training alone."""
    rising = higher_is_better(metric)
    means = finals.mean().dropna().sort_values(ascending=not rising)
    best, *others = means.index
    gaps = {}
    for other in others:
        if other in (others[0], *alone):
            gap = (finals[best] - finals[other]).dropna()
            # The best method is known only after the comparison of all pairs.
            half = half_interval(gap, math.comb(len(means), 2))
            gaps[other] = (gap.mean(), half, len(gap))
    return {"best": best, "mean": means[best], "metric": metric, "gaps": gaps}


def _study_pictures(
    runs: Mapping[str, Sequence[RunFiles]],
    finals: pd.DataFrame,
    metric: str,
    where: str,
    numbers: Mapping[str, int],
    file: Path,
) -> Iterator[str]:
    """Yield the final main metric of each method, and the curves of the best three."""
    mean, half = finals.mean(), finals.apply(half_interval)
    points = pd.DataFrame({"mean": mean, "low": mean - half, "high": mean + half})
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
