"""The command ``fedbn-flwr report``, for one HTML page of a run or a study.

The page is the template ``report.html`` with the style ``report.css`` and loads no other
file. This module makes its contents: the answer first, then the sites, the rounds, the
findings about BatchNorm, and everything else behind a click. The page of an unfinished
run shows its present state.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError, FedBNError
from fedbn_flwr.lab import report_pictures as pictures
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.files import (
    CONFIG_FILE,
    STUDY_FILE,
    ledger_of,
    read_json,
    read_metrics,
    refuse_no_results,
    site_label,
)
from fedbn_flwr.lab.output.folder import DIVERGED_AT, STATISTICS_FILE
from fedbn_flwr.lab.references import (
    ALONE,
    Comparison,
    alone_command,
    compare,
    references_of,
)
from fedbn_flwr.lab.run_files import RunFiles, run_warnings
from fedbn_flwr.lab.studies.one_run import failure_of, is_done, of_study, summary_of
from fedbn_flwr.lab.studies.results import rows_of, table
from fedbn_flwr.lab.studies.study import Cell, Study
from fedbn_flwr.training.tasks import higher_is_better, in_percent, quantity_of

REPORT_FILE = "report.html"
_GENERATOR = '<meta name="generator" content="fedbn-flwr report">'
_DIAGNOSIS = "doctor.json"
_TESTS = ("test-", "personal-", "validation-", "held-out-", "train-")
_SHOWN = 30
"""The most sites in a picture; the table has all of them."""


@dataclass
class Section:
    """A part of the page.

    Attributes:
        title: the heading, or the line to click.
        texts: paragraphs.
        pictures: figures, as HTML.
        table: a table, as HTML.
        verbatim: the text of a file.
    """

    title: str
    texts: list[str] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)
    table: str | None = None
    verbatim: str = ""


def write_report(
    folder: Path, out: Path | None = None, against: Sequence[Path] = ()
) -> Path:
    """Write the report of a run or a study in its present state, and return the file.

    Args:
        folder: the folder of a run or a study, finished or not.
        out: the file; by default, ``report.html`` in the folder. An older report is
            replaced.
        against: folders of runs to compare a run with. By default, these are the
            finished runs in the same parent folder with the same data, split, seed and
            test.

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
        run = RunFiles.read(folder)
        page = _run_page(run, references_of(run, against) if run.summary else [])

    # The style is in the page, because a report is sent as one file.
    here = Path(__file__).parent
    page["style"] = Markup((here / "report.css").read_text(encoding="utf-8"))
    page["generator"] = Markup(_GENERATOR)
    now = f"{datetime.now():%Y-%m-%d at %H:%M:%S}"
    page["foot"] = f"Made by fedbn-flwr {version('fedbn-flwr')} on {now}."
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(here),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"shown": _shown, "named": _named, "label": site_label}
    text = environment.get_template("report.html").render(page)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text)
    except OSError as error:
        raise ConfigError(f"out={str(target)!r} cannot be written: {error}") from error
    return target


def _run_page(run: RunFiles, references: Sequence[RunFiles]) -> dict[str, Any]:
    """Return the contents of the page of a run."""
    config = run.config
    sites, comparison, unknown = _tested_sites(run, references)
    done = run.summary.get("rounds", len(run.lines))
    subtitle = (
        f"{done} of {config.num_server_rounds} rounds. Model {config.model}, seed"
        f" {config.seed}."
    )
    sections = []
    drawn = _site_picture(run, sites, references)
    rounds = _rounds_picture(run, references)
    if drawn or rounds:
        texts = [unknown] if unknown else []
        found = [one for one in (drawn, rounds) if one]
        sections.append(Section("Sites and rounds", texts, found))
    elif not run.final:
        sections.append(Section("Rounds", [run.lost or "No round is finished yet."]))
    if sites:
        by_site = _table(_by_site(run, sites, comparison))
        sections.append(Section("All metrics by site", table=by_site))
    diagnosis = {}
    if (run.folder / _DIAGNOSIS).is_file():
        diagnosis = read_json(run.folder / _DIAGNOSIS)
    return {
        "title": f"{config.title} on {config.dataset}",
        "subtitle": subtitle,
        "answer": _answer(run, sites, comparison),
        "warnings": list(run_warnings(run)),
        "sections": sections,
        "cards": diagnosis.get("findings", []),
        "details": list(_details(run, diagnosis)),
    }


def _tested_sites(
    run: RunFiles, references: Sequence[RunFiles]
) -> tuple[list[dict[str, Any]], Comparison | None, str]:
    """Return the sites with intervals, the comparison, and why intervals are missing."""
    sites = [dict(row) for row in run.summary.get("sites", ())]
    if not sites:
        return [], None, ""
    # torch and the data of the run are needed to test the saved models again.
    from fedbn_flwr.lab.finished_runs.sites import sites_of_run

    unknown = ""
    try:
        against = references[0].folder if references else None
        tested = sites_of_run(run.folder, against)
    except FedBNError as error:
        # The runs' own tables have the values, but no intervals.
        tested, unknown = sites, f"The sites have no intervals: {error}"
        known = references[0].summary.get("sites", ()) if references else ()
        others = {row["site"]: row.get("value") for row in known}
        for row in sites:
            mine, other = row.get("value"), others.get(row["site"])
            if mine is not None and other is not None:
                row["difference"] = mine - other
    found = compare(run, references[0], tested) if references else None
    return tested, found, unknown


def _answer(
    run: RunFiles, sites: Sequence[Mapping[str, Any]], comparison: Comparison | None
) -> dict[str, Any]:
    """Return the numbers of the answer for the template."""
    metric = quantity_of(run.headline)
    best, worst, sign, extreme = max, min, 1, "Lowest"
    if not higher_is_better(metric):
        best, worst, sign, extreme = min, max, -1, "Highest"
    rounds, values = run.curve(run.headline)
    known = [row for row in sites if row.get("value") is not None]
    totals = run.summary.get("ledger") or ledger_of(run.lines)
    return {
        "run": run,
        "metric": metric,
        "unit": " points" if in_percent(metric) else "",
        "value": run.final.get(run.headline),
        "best": best(values) if values else None,
        "best_round": rounds[values.index(best(values))] if values else None,
        "sites": sites,
        "extreme": extreme,
        "lowest": worst(known, key=lambda row: row["value"]) if known else None,
        "comparison": comparison,
        "gain": sign * comparison.difference if comparison else 0.0,
        "mebibytes": (totals.get("bytes-down", 0) + totals.get("bytes-up", 0)) / 2**20,
        "exchanges": totals.get("exchanges", 0),
        "seconds": sum(line["seconds"] for line in run.lines),
        "examples": sum(row["examples"] for row in sites),
        "alone": run.config.strategy == ALONE,
        "command": alone_command(run.config, run.folder.parent / ALONE),
        "scale": 100 if in_percent(metric) else 1,
        "sign": f"{{:+{_form(metric)}}}".format,
    }


def _named(run: RunFiles) -> str:
    """Return the name of a reference run."""
    if run.config.strategy == ALONE:
        return "training alone"
    return f"{run.config.title} ({run.folder.name})"


def _values_of(run: RunFiles) -> dict[str, float | None]:
    """Return the main metric of a run by site, in the shown unit."""
    scale = 100 if in_percent(run.headline) else 1
    found = {}
    for row in run.summary.get("sites", ()):
        value = row.get("value")
        found[row["site"]] = None if value is None else scale * value
    return found


def _site_picture(
    run: RunFiles, sites: Sequence[Mapping[str, Any]], references: Sequence[RunFiles]
) -> str:
    """Return the picture of the sites with their intervals and the reference runs."""
    metric = quantity_of(run.headline)
    scale = 100 if in_percent(metric) else 1
    known = [row for row in sites if row.get("value") is not None]
    if not known:
        return ""
    caption = f"{metric} at each site, with 95 % intervals of its test examples."
    if len(known) > _SHOWN:
        known = sorted(known, key=lambda row: row["value"])
        known = known[: _SHOWN // 2] + known[-_SHOWN // 2 :]
        caption += f" The {_SHOWN // 2} lowest and highest of {len(sites)} sites."
    others = [_values_of(one) for one in references]
    rows = []
    for row in known:
        ends = [row.get(end) for end in ("low", "high")]
        low, high = (None if end is None else scale * end for end in ends)
        values = [scale * row["value"], *(one.get(row["site"]) for one in others)]
        name = f"{site_label(row)} n={row['examples']}"
        rows.append(pictures.Point(name, values, low, high))
    kinds = ["this run", *map(_named, references)]
    return pictures.rows(rows, kinds, _label(metric), caption)


def _rounds_picture(run: RunFiles, references: Sequence[RunFiles]) -> str:
    """Return the picture of the main metric over the rounds."""
    headline = run.headline
    shown = {"this run": run.curve(headline)}
    if not shown["this run"][0]:
        return ""
    for one in references:
        shown[_named(one)] = one.curve(headline)
    # The curve of each site, from the tests of the clients.
    metric = quantity_of(headline)
    scale = 100 if in_percent(metric) else 1
    by_site: dict[str, tuple[list[int], list[float]]] = {}
    for line in run.lines:
        for client, tests in line.get("clients", {}).items():
            value = tests.get(f"own-{metric}")
            if value is not None and headline.startswith("personal-own"):
                rounds, values = by_site.setdefault(client, ([], []))
                rounds.append(line["round"])
                values.append(scale * value)
    caption = f"{metric} over the rounds"
    if by_site:
        caption += "; thin lines are the sites"
    thin = list(by_site.values())[:_SHOWN]
    marks = _phase_changes(run)
    return pictures.curves(shown, _label(metric), f"{caption}.", thin=thin, marks=marks)


def _by_site(
    run: RunFiles, sites: Sequence[Mapping[str, Any]], comparison: Comparison | None
) -> pd.DataFrame:
    """Return a row for each site and a column for each metric of its last test."""
    # Clients have their numbers in the lines, and the sites are in the same order.
    tested = [line for line in run.lines if line["round"] == run.final.get("round")]
    clients = tested[-1].get("clients", {}) if tested else {}
    domains: dict[str, dict[str, float]] = run.final.get("domains", {})
    took_part = [line.get("participants", ()) for line in run.lines]
    metric = quantity_of(run.headline)
    rows = []
    for at, site in enumerate(sites):
        row: dict[str, Any] = {"site": site_label(site), "test": site["examples"]}
        row[_label(metric)] = site.get("error") or _shown(site.get("value"), metric)
        own = clients.get(str(at), {})
        of_domain = {
            key.removeprefix("test-"): values[site["site"]]
            for key, values in domains.items()
            if site["site"] in values and key.startswith("test-")
        }
        for key, value in (of_domain or own).items():
            name = key.removeprefix("own-")
            if name not in (metric, "num-examples") and (of_domain or name != key):
                row[_label(name)] = _shown(value, name)
        if comparison:
            change = comparison.by_site.get(site["site"])
            column = f"against {_named(comparison.reference)}"
            row[column] = "-" if change is None else f"{change:+{_form(metric)}}"
        if clients and not site.get("held-out"):
            part = sum(at in of_round for of_round in took_part)
            row["rounds"] = f"{part} of {len(took_part)}"
        rows.append(row)
    return pd.DataFrame(rows)


def _details(run: RunFiles, diagnosis: Mapping[str, Any]) -> Iterator[Section]:
    """Yield everything that the page shows after a click."""
    other = _other_curves(run)
    if other:
        yield Section("Curves of the other metrics", pictures=other)
    if run.final:
        yield Section("All figures of the result", table=_table(_result(run)))
    if run.lines:
        rounds = pd.DataFrame({"round": [line["round"] for line in run.lines]})
        rounds["seconds"] = [f"{line['seconds']:.2f}" for line in run.lines]
        rounds["clients"] = [len(line.get("participants", ())) for line in run.lines]
        rounds["refused or lost"] = [
            "; ".join(map(str, line.get("rejected", ()))) for line in run.lines
        ]
        rounds["MiB down"] = _mib(run.lines, "bytes-down")
        rounds["MiB up"] = _mib(run.lines, "bytes-up")
        yield Section("Messages, bytes and time of each round", table=_table(rounds))
    yield from _batchnorm(run)
    notes = [*diagnosis.get("not-measured", ()), *diagnosis.get("notes", ())]
    if notes:
        yield Section("Notes of the doctor", notes)
    settings = _settings(run.config)
    again = "To repeat the run: fedbn-flwr run config.yaml --out runs/again"
    texts = ["Every other setting has its default.", again]
    if run.summary.get("versions"):
        facts = {"SHA-256 of the final state": run.summary["sha256"]}
        facts |= {"seed": run.summary["seed"], **run.summary["versions"]}
        texts.append(", ".join(f"{name}: {value}" for name, value in facts.items()))
    title = f"Settings that differ from the defaults ({len(settings)}), versions"
    yield Section(title, texts, table=_table(settings))


def _mib(lines: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    return [f"{line.get(key, 0) / 2**20:.3f}" for line in lines]


def _other_curves(run: RunFiles) -> list[str]:
    """Return a picture for each further quantity, the loss last."""
    # The tests of each quantity, in the order of the lines.
    curves: dict[str, dict[str, pictures.Curve]] = {}
    for key in dict.fromkeys(itertools.chain.from_iterable(run.lines)):
        # a mean that another one repeats, or a list of values, one for each client
        if not key.startswith(_TESTS) or key.endswith(("-clients", "-weighted")):
            continue
        rounds, values = run.curve(key)
        if rounds and key != run.headline:
            quantity = quantity_of(key)
            test = key.removesuffix(f"-{quantity}")
            curves.setdefault(quantity, {})[test] = rounds, values
    found = []
    for quantity in sorted(curves, key=lambda name: (name == "loss", name)):
        label, marks = _label(quantity), _phase_changes(run)
        found.append(pictures.curves(curves[quantity], label, f"{label}.", marks=marks))
    return found


def _phase_changes(run: RunFiles) -> list[int]:
    """Return the rounds after which the phase changes, such as T* of FixBN."""
    return [
        one["round"]
        for one, after in itertools.pairwise(run.lines)
        if one.get("phase") != after.get("phase")
    ]


def _result(run: RunFiles) -> pd.DataFrame:
    """Return the figures of the result."""
    rows = []
    for key, value in run.final.items():
        is_number = value is None or isinstance(value, (int, float))
        if key.startswith(_TESTS) and is_number:
            rows.append((_label(key), _shown(value, key)))
    for key, by_domain in run.final.get("domains", {}).items():
        for domain, value in by_domain.items():
            rows.append((f"{_label(key)}: {domain}", _shown(value, key)))
    return pd.DataFrame(rows, columns=["figure", "value"])


def _settings(config: Config) -> pd.DataFrame:
    """Return the settings that are not the defaults."""
    fields = {field.alias: field for field in Config.model_fields.values()}
    rows = []
    for key, value in config.to_mapping().items():
        if value != fields[key].default:
            meaning = (fields[key].description or "").replace("`", "")
            rows.append({"key": key, "value": str(value), "meaning": meaning})
    return pd.DataFrame(rows)


def _batchnorm(run: RunFiles) -> Iterator[Section]:
    """Yield the pictures of ``statistics.jsonl``, or the reason why it is absent."""
    title = "Distances of the BatchNorm statistics"
    recorded = read_metrics(run.folder / STATISTICS_FILE)
    lines = [line for line in recorded if line.get("layers")]
    if not lines:
        yield Section(title, ["The server saw no statistics of single clients."])
        return
    text = (
        "Distances of each client's batch statistics from the global statistics that it"
        " got, and of the global statistics after a round from the statistics before it"
        " (L1 norms, FixBN's Fig. 3). If they are far apart, BatchNorm normalises with"
        " other numbers in training than in tests."
    )

    # The clients' distances, with a band, and the change of the global statistics.
    clients = _distances(lines)
    rounds = list(clients.index)
    curves = {"clients, median": (rounds, list(clients["median"]))}
    bands = {"clients, median": (list(clients["min"]), list(clients["max"]))}
    change = {}
    for line in lines:
        of_layers = [layer["change"]["l1"] or 0 for layer in line["layers"].values()]
        # Frozen BatchNorm has the distance 0, but 0 has no logarithm.
        if sum(of_layers):
            change[line["round"]] = sum(of_layers)
    if change:
        curves["change of the global statistics"] = list(change), list(change.values())
    caption = (
        "Sums over the layers. The band reaches from the nearest to the farthest"
        " client."
    )
    marks = _phase_changes(run)
    found = [
        pictures.curves(
            curves, "L1 distance", caption, marks=marks, bands=bands, log=True
        )
    ]
    by_layer = _median_distances(lines)
    if by_layer.empty:
        yield Section(title, [text, "No layer tracked its statistics."], found)
        return
    where = by_layer.max(axis="columns").idxmax()
    largest = by_layer.max().max()
    caption = (
        f"By layer, median over the clients. The largest is {largest:.3g}, in {where}."
    )
    found.append(pictures.heat_map(by_layer, "L1 distance", caption))
    yield Section(title, [text], found)


def _distances(lines: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the median, min and max distance of a client, by round.

    A distance is the L1 norm summed over the layers that track.
    """
    rows = {}
    for line in lines:
        layers = [layer["clients"]["l1"] for layer in line["layers"].values()]
        # zip gives the distances of one client in all layers that any client tracks
        by_client = zip(*filter(any, layers), strict=True)
        tracked = [sum(values) for values in by_client if None not in values]
        if tracked:
            middle = statistics.median(tracked)
            rows[line["round"]] = [middle, min(tracked), max(tracked)]
    columns = ["median", "min", "max"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def _median_distances(lines: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the median distance over the clients, by layer and recorded round."""
    # A row for each layer, a column for each of about forty rounds.
    shown = lines[:: pictures.step(lines, 40)]
    cells: dict[int, dict[str, float]] = {}
    for line in shown:
        cells[line["round"]] = {}
        for path, layer in line["layers"].items():
            known = [value for value in layer["clients"]["l1"] if value is not None]
            if known:
                cells[line["round"]][path] = statistics.median(known)
    layers = list(dict.fromkeys(path for line in shown for path in line["layers"]))
    values = pd.DataFrame(cells, index=layers, dtype=float)
    # A round without a tracked distance would be a white column.
    return values.dropna(axis="columns", how="all")


def _study_page(folder: Path) -> dict[str, Any]:
    """Return the contents of the page of a study."""
    # Use the begun runs of this study, since another study's may be in the folder.
    study = Study.read(folder / STUDY_FILE)
    cells = list(study.cells())
    runs = []
    for cell in cells:
        if (cell.folder(folder) / CONFIG_FILE).is_file() and of_study(cell, folder):
            runs.append((cell, RunFiles.read(cell.folder(folder))))
    counts = {"methods": study.methods, "splits": study.splits, "runs": cells}
    subtitle = ", ".join(f"{len(values)} {name}" for name, values in counts.items())

    # The table of the sweep, and two pictures for each split.
    note = (
        "Means over the seeds ± the sample standard deviation. p is the p value of the"
        " paired t test over the seeds."
    )
    points, curves = [], []
    for split in study.splits:
        where = f", {split}" if len(study.splits) > 1 else ""
        of_split = [(cell.method, run) for cell, run in runs if cell.split == split]
        points.append(_method_picture(of_split, where))
        curves.append(_mean_curves(of_split, where))
    results = Section("Results", [note], [one for one in points if one])
    results.table = _table(table(rows_of(study, folder)))
    drawn = [one for one in curves if one]
    details = []
    for file in (folder / "tuning.md", folder / STUDY_FILE):
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            details.append(Section(file.name, verbatim=text))
    return {
        "title": study.name,
        "subtitle": subtitle,
        "answer": None,
        "warnings": list(_incomplete(cells, folder)),
        "sections": [results, *([Section("Curves", pictures=drawn)] if drawn else [])],
        "cards": [],
        "details": details,
    }


def _incomplete(cells: Sequence[Cell], out: Path) -> Iterator[str]:
    """Yield the runs that the means lack."""
    lists: dict[str, list[str]] = {"Diverged": [], "Failed": [], "Not finished": []}
    for cell in cells:
        if not is_done(cell, out):
            what = "Failed" if failure_of(cell, out) else "Not finished"
            lists[what].append(cell.name)
        elif DIVERGED_AT in summary_of(cell.folder(out)):
            lists["Diverged"].append(cell.name)
    for what, names in lists.items():
        if names:
            yield f"{what}, and left out of the means: {', '.join(names)}."


def _method_picture(runs: Sequence[tuple[str, RunFiles]], where: str) -> str:
    """Return the final main metric of each method, with the interval over the seeds."""
    found: dict[str, list[float]] = {}
    metrics: dict[str, None] = {}
    for method, run in runs:
        value = run.final.get(run.headline)
        if value is not None and run.summary and not run.diverged_at:
            metric = quantity_of(run.headline)
            metrics[_label(metric)] = None
            scale = 100 if in_percent(metric) else 1
            found.setdefault(method, []).append(scale * value)
    if not found:
        return ""
    rows = []
    for method, values in found.items():
        mean = statistics.fmean(values)
        low, high = None, None
        if len(values) > 1:
            # SciPy takes long to import, and only this picture needs it here.
            from scipy import stats

            error = statistics.stdev(values) / len(values) ** 0.5
            half = float(stats.t.ppf(0.975, len(values) - 1)) * error
            low, high = mean - half, mean + half
        rows.append(pictures.Point(method, [mean], low, high))
    caption = f"Final main metric{where}: mean and 95 % interval over the seeds."
    return pictures.rows(rows, ["mean"], ", ".join(metrics), caption)


def _mean_curves(runs: Sequence[tuple[str, RunFiles]], where: str) -> str:
    """Return the main metric of each method, with the seeds' mean and range."""
    # The values of each method and round, over the seeds. Methods may have their own
    # metrics. A diverged run has no place in a mean.
    metrics: dict[str, None] = {}
    values: dict[str, dict[int, list[float]]] = {}
    for method, run in runs:
        by_round = values.setdefault(method, {})
        if run.diverged_at:
            continue
        metrics[_label(quantity_of(run.headline))] = None
        for at, value in zip(*run.curve(run.headline), strict=True):
            by_round.setdefault(at, []).append(value)

    curves, bands = {}, {}
    for method, by_round in values.items():
        rounds = sorted(by_round)
        of_seeds = [by_round[at] for at in rounds]
        curves[method] = rounds, [statistics.fmean(seeds) for seeds in of_seeds]
        bands[method] = list(map(min, of_seeds)), list(map(max, of_seeds))
    if not any(rounds for rounds, _ in curves.values()):
        return ""
    caption = f"Main metric{where}: mean over the seeds, lowest to highest."
    return pictures.curves(curves, ", ".join(metrics), caption, bands=bands)


def _table(frame: pd.DataFrame) -> Markup:
    # pandas escapes cells but cuts long texts; the block scrolls on a narrow screen
    with pd.option_context("display.max_colwidth", None):
        text = frame.to_html(border=0, index=False, na_rep="-")
    return Markup(f'<div class="table">{text}</div>')


def _label(key: str) -> str:
    return f"{key}, %" if in_percent(key) else key


def _form(key: str) -> str:
    return ".1f" if in_percent(key) else ".4f"


def _shown(value: float | None, key: str) -> str:
    """Return a value of a metric in the form of the page."""
    if value is None:
        return "-"
    scale = 100 if in_percent(key) else 1
    return f"{scale * value:{_form(key)}}"
