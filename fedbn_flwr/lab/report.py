"""The command ``fedbn-flwr report``, for one HTML page of a run or a study.

The page is the template ``report.html`` with the style ``report.css`` and loads no other
file. The template has the words and the order: the answer first, then the sites, the
rounds, the findings about BatchNorm, and everything else behind a click. This module
has the facts and the pictures. The page of an unfinished run shows its present state.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab import report_pictures as pictures
from fedbn_flwr.lab.answer import ask_alone, facts_of, label_of, scale_of, shown, signed
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.files import (
    CONFIG_FILE,
    STUDY_FILE,
    read_json,
    read_metrics,
    refuse_no_results,
    site_label,
)
from fedbn_flwr.lab.output.folder import DIVERGED_AT, STATISTICS_FILE
from fedbn_flwr.lab.references import compare, name_of, references_of, site_rows
from fedbn_flwr.lab.run_files import TESTS, RunFiles, run_warnings
from fedbn_flwr.lab.studies.one_run import failure_of, is_done, of_study, summary_of
from fedbn_flwr.lab.studies.results import rows_of, table
from fedbn_flwr.lab.studies.study import Study
from fedbn_flwr.training.tasks import higher_is_better, quantity_of

REPORT_FILE = "report.html"
_GENERATOR = '<meta name="generator" content="fedbn-flwr report">'
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
            finished runs in the same parent folder with the same data, split, seed and
            test.
        reload_after: the seconds after which a browser loads the page again; 0 if it
            does not.

    Raises:
        ConfigError: the folder is neither, the file is not a report, it cannot be
            written, or a run of ``against`` cannot be compared.
    """
    # Another file of this name must not be replaced.
    target = out or folder / REPORT_FILE
    is_other = target.is_dir()
    if target.is_file():
        is_other = _GENERATOR.encode() not in target.read_bytes()[:1000]
    if is_other:
        raise ConfigError(
            f"out={str(target)!r} is there and is not a report. Choose another file."
        )

    if (folder / STUDY_FILE).is_file():
        if against:
            raise ConfigError(f"{folder} is a study: --against compares two runs.")
        page = _study_page(folder)
    else:
        refuse_no_results(folder)
        page = _run_page(RunFiles.read(folder), against)

    # The style is in the page, because a report is sent as one file.
    here = Path(__file__).parent
    page["style"] = Markup((here / "report.css").read_text(encoding="utf-8"))
    page["generator"] = Markup(_GENERATOR)
    page["reload_after"] = reload_after
    page["version"] = version("fedbn-flwr")
    page["now"] = datetime.now()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(here),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"shown": shown, "signed": signed, "key": label_of}
    environment.filters |= {"named": name_of, "label": site_label}
    text = environment.get_template("report.html").render(page)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text)
    except OSError as error:
        raise ConfigError(f"out={str(target)!r} cannot be written: {error}") from error
    return target


def _run_page(run: RunFiles, against: Sequence[Path]) -> dict[str, Any]:
    """Return the contents of the page of a run."""
    references = references_of(run, against) if run.summary else []
    # The intervals of the sites come with the first comparison.
    sites, unknown = site_rows(run, references[0] if references else None)
    comparisons = [compare(run, one, sites) for one in references[:1]]
    for one in references[1:]:
        comparisons.append(compare(run, one, site_rows(run, one)[0]))
    known = [one for one in comparisons if one]
    diagnosis = read_json(run.folder / "doctor.json")
    fields = {field.alias: field for field in Config.model_fields.values()}
    settings = run.config.to_mapping()
    return {
        "title": f"{run.title} on {run.config.dataset}",
        "run": run,
        "metric": quantity_of(run.headline),
        "tests": TESTS,
        "sites": sites,
        "columns": list(
            dict.fromkeys(itertools.chain(*(row["metrics"] for row in sites)))
        ),
        "comparisons": known,
        "facts": facts_of(run, sites, known),
        "warnings": [*run_warnings(run), *filter(None, [unknown])],
        "suggested": ask_alone(run),
        "pictures": [
            _site_picture(run, sites, references),
            _rounds_picture(run, references),
        ],
        "cards": diagnosis.get("findings", ()),
        "notes": [*diagnosis.get("not-measured", ()), *diagnosis.get("notes", ())],
        "other_curves": _other_curves(run),
        "statistics": _statistics(run),
        "settings": [
            (key, value, fields[key].description)
            for key, value in settings.items()
            if value != fields[key].default
        ],
    }


def _site_picture(
    run: RunFiles, sites: Sequence[Mapping[str, Any]], references: Sequence[RunFiles]
) -> str:
    """Return the picture of the sites with their intervals and the reference runs."""
    metric = quantity_of(run.headline)
    known = [row for row in sites if row.get("value") is not None]
    if not known:
        return ""
    caption = f"Sites: {metric}"
    if any(row.get("low") is not None for row in known):
        caption += " with the 95 % interval over the test examples"
    if len(known) > _SHOWN:
        known.sort(key=lambda row: row["value"])
        known = known[: _SHOWN // 2] + known[-_SHOWN // 2 :]
        caption += f", the {_SHOWN // 2} lowest and highest of {len(sites)} sites"
    others = []
    for one in references:
        others.append({row["site"]: row.get("value") for row in one.sites()})
    rows = []
    for row in known:
        values = [row["value"], *(one.get(row["site"]) for one in others)]
        ends = [row.get("low"), row.get("high")]
        drawn = [
            None if value is None else scale_of(metric) * value
            for value in (*values, *ends)
        ]
        low, high = drawn[-2:]
        more = f"n={row['examples']}"
        rows.append(pictures.Point(site_label(row), drawn[:-2], low, high, more))
    kinds = ["this run", *map(name_of, references)]
    return pictures.rows(rows, kinds, label_of(metric), f"{caption}.")


def _rounds_picture(run: RunFiles, references: Sequence[RunFiles]) -> str:
    """Return the picture of the main metric over the rounds."""
    shown = {"this run": run.curve(run.headline)}
    if not shown["this run"][0]:
        return ""
    for one in references:
        shown[name_of(one)] = one.curve(run.headline)
    # The curve of each site, from the tests of the clients.
    metric = quantity_of(run.headline)
    thin: dict[str, pictures.Curve] = {}
    if run.headline.startswith("personal-own"):
        thin = dict(itertools.islice(run.site_curves(f"own-{metric}").items(), _SHOWN))
    caption = f"Rounds: {metric}"
    if thin:
        caption += "; a thin line is a site"
    return pictures.curves(
        shown, label_of(metric), f"{caption}.", thin=thin, marks=_phase_changes(run)
    )


def _other_curves(run: RunFiles) -> list[str]:
    """Return a picture for each further quantity, the loss last."""
    # The tests of each quantity, in the order of the lines.
    curves: dict[str, dict[str, pictures.Curve]] = {}
    for key in dict.fromkeys(itertools.chain.from_iterable(run.lines)):
        # a mean that another one repeats, or a list of values, one for each client
        if not key.startswith(TESTS) or key.endswith(("-clients", "-weighted")):
            continue
        curve, quantity = run.curve(key), quantity_of(key)
        if curve[0] and key != run.headline:
            test = key.removesuffix(f"-{quantity}")
            curves.setdefault(quantity, {})[test] = curve
    found = []
    for quantity in sorted(curves, key=lambda name: (name == "loss", name)):
        label, marks = label_of(quantity), _phase_changes(run)
        caption = f"Rounds: {label}."
        found.append(pictures.curves(curves[quantity], label, caption, marks=marks))
    return found


def _phase_changes(run: RunFiles) -> list[int]:
    """Return the rounds after which the phase changes, such as T* of FixBN."""
    return [
        one["round"]
        for one, after in itertools.pairwise(run.lines)
        if one.get("phase") != after.get("phase")
    ]


def _statistics(run: RunFiles) -> str:
    """Return the picture of ``statistics.jsonl``, or "" if it has no distances."""
    distances: dict[int, list[float]] = {}
    change: dict[int, float] = {}
    for line in read_metrics(run.folder / STATISTICS_FILE):
        layers = line.get("layers", {}).values()
        # zip gives the distances of one client in all layers that any client tracks
        known = [values for layer in layers if any(values := layer["clients"]["l1"])]
        sums = [sum(own) for own in zip(*known, strict=True) if None not in own]
        moved = sum(layer["change"]["l1"] or 0 for layer in layers)
        # Frozen BatchNorm has the distance 0, but 0 has no logarithm.
        if sums and min(sums) > 0:
            distances[line["round"]] = sums
        if moved:
            change[line["round"]] = moved
    if not distances:
        return ""
    name, rounds = "clients, median", list(distances)
    curves = {name: (rounds, list(map(statistics.median, distances.values())))}
    ends = [list(map(end, distances.values())) for end in (min, max)]
    if change:
        curves["change of the global statistics"] = list(change), list(change.values())
    caption = "Sums over the layers; the band covers all clients."
    return pictures.curves(
        curves,
        "L1 distance",
        caption,
        marks=_phase_changes(run),
        bands={name: (ends[0], ends[1])},
        log=True,
    )


def _study_page(folder: Path) -> dict[str, Any]:
    """Return the contents of the page of a study."""
    # Use the begun runs of this study, since another study's may be in the folder.
    study = Study.read(folder / STUDY_FILE)
    cells = list(study.cells())
    drawn = []
    for split in study.splits:
        runs: dict[str, list[RunFiles]] = {}
        for cell in cells:
            out = cell.folder(folder)
            begun = cell.split == split and (out / CONFIG_FILE).is_file()
            if begun and of_study(cell, folder):
                run = RunFiles.read(out)
                # A diverged run has no place in a mean.
                if not run.diverged_at:
                    runs.setdefault(cell.method, []).append(run)
        where = f", {split}" if len(study.splits) > 1 else ""
        drawn += _study_pictures(runs, where)
    failures, warnings = [], []
    lists: dict[str, list[str]] = {"Diverged": [], "Failed": [], "Not finished": []}
    for cell in cells:
        failure = failure_of(cell, folder)
        if not is_done(cell, folder):
            lists["Failed" if failure else "Not finished"].append(cell.name)
        elif DIVERGED_AT in summary_of(cell.folder(folder)):
            lists["Diverged"].append(cell.name)
        if failure:
            failures.append((cell.name, failure["error"]))
    for what, names in lists.items():
        if names:
            text = ", ".join(names[:_SHOWN])
            warnings.append(f"{what}, and left out of the means: {text}.")
    counts = {"methods": study.methods, "splits": study.splits, "runs": cells}
    tuning = []
    if (folder / "tuning.md").is_file():
        for line in (folder / "tuning.md").read_text(encoding="utf-8").splitlines():
            if line.startswith("| "):
                tuning.append(line.strip("| ").split(" | "))
    return {
        "title": study.name,
        "counts": {name: len(values) for name, values in counts.items()},
        "warnings": warnings,
        "failures": failures,
        "pictures": drawn,
        "results": table(rows_of(study, folder)).to_dict("split"),
        "tuning": tuning,
        "study": (folder / STUDY_FILE).read_text(encoding="utf-8"),
    }


def _study_pictures(runs: Mapping[str, Sequence[RunFiles]], where: str) -> list[str]:
    """Return the final main metric of each method, and the curves of the best three."""
    # Methods may have their own metrics.
    labels: dict[str, None] = {}
    rows, curves = [], {}
    bands: dict[str, Any] = {}
    for method, of_seeds in runs.items():
        finals = []
        by_round: dict[int, list[float]] = {}
        for run in of_seeds:
            metric = quantity_of(run.headline)
            labels[label_of(metric)] = None
            value = run.final.get(run.headline)
            if value is not None and run.summary:
                finals.append(scale_of(metric) * value)
            for at, tested in zip(*run.curve(run.headline), strict=True):
                by_round.setdefault(at, []).append(tested)
        if by_round:
            rounds = sorted(by_round)
            values = [by_round[at] for at in rounds]
            curves[method] = rounds, list(map(statistics.fmean, values))
            bands[method] = list(map(min, values)), list(map(max, values))
        if finals:
            rows.append(pictures.Point(method, [statistics.fmean(finals)], *_t(finals)))
    label = ", ".join(labels)
    found = []
    if rows:
        caption = f"Final main metric{where}: mean and 95 % interval over the seeds."
        found.append(pictures.rows(rows, ["mean"], label, caption))
    if curves:
        rising = all(map(higher_is_better, labels))
        best = sorted(curves, key=lambda one: curves[one][1][-1], reverse=rising)[:3]
        caption = (
            f"The best {len(best)}{where}: mean over the seeds, lowest to highest."
        )
        top = {method: curves[method] for method in best}
        found.append(pictures.curves(top, label, caption, bands=bands))
    return found


def _t(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the 95 % interval of a mean, if there are two values or more."""
    if len(values) < 2:
        return None, None
    # SciPy takes long to import, and only this picture needs it here.
    from scipy import stats

    error = statistics.stdev(values) / len(values) ** 0.5
    half = float(stats.t.ppf(0.975, len(values) - 1)) * error
    mean = statistics.fmean(values)
    return mean - half, mean + half
