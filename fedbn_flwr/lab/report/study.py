"""The report of a study."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fedbn_flwr.lab.files import STUDY_FILE
from fedbn_flwr.lab.report.page import Block, Code, Facts, Listing, More, Page, Section, Table, Text
from fedbn_flwr.lab.report.run import command, method_name, run_warnings
from fedbn_flwr.lab.report.run_files import RunFiles
from fedbn_flwr.lab.report.shown import duration, form_of, in_percent, scaled, setting, size, unit_of, with_unit
from fedbn_flwr.lab.report.split_figures import split_figures
from fedbn_flwr.lab.report.study_figures import (
    comparison_section,
    curves_section,
    domains_section,
)
from fedbn_flwr.lab.report.study_files import StudyFiles
from fedbn_flwr.lab.report.study_statistics import statistics_section
from fedbn_flwr.lab.report.study_tables import anchor_of, results_section
from fedbn_flwr.lab.studies.cell import Cell
from fedbn_flwr.lab.studies.done import failure_of
from fedbn_flwr.training.tasks import higher_is_better

__all__ = ["study_page"]


def study_page(files: StudyFiles, foot: str, live: int = 0) -> Page:
    """Return the page of a study.

    Args:
        files: its files.
        foot: the last line of the page.
        live: seconds after which an open page is loaded again; 0 = never.
    """
    sections = [
        results_section(files),
        comparison_section(files),
        curves_section(files),
        domains_section(files),
        statistics_section(files),
        settings_section(files),
        split_section(files),
        runs_section(files),
        reproduce_section(files),
    ]
    return Page(
        title=files.study.name,
        above=f"Report of a study{', still running' if live else ''}",
        lead=[
            Text(_sentence(files), "lead"),
            Facts(list(_facts(files))),
            *(Text(w, "warning") for w in _warnings(files)),
        ],
        sections=[section for section in sections if section],
        foot=foot,
        live=live,
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _sentence(files: StudyFiles) -> str:
    study = files.study
    parts = [_count(len(study.methods), "method")]
    parts += [_count(len(study.splits), "split")] if len(study.splits) > 1 else []
    parts += [_count(len(study.seeds), "seed")]
    grid = f"{', '.join(parts[:-1])} and {parts[-1]}: {_count(len(files.cells), 'run')}."
    best = list(_best(files))
    return " ".join([grid, *best]) if len(best) <= 2 else grid


def _best(files: StudyFiles) -> Iterator[str]:
    """Yield for each split and metric the method with the best mean."""
    for split, metric in dict.fromkeys((row["split"], row["metric"]) for row in files.table if row["mean"] is not None):
        rows = [
            row for row in files.table if (row["split"], row["metric"]) == (split, metric) and row["mean"] is not None
        ]
        if len(rows) < 2:
            continue
        choose = max if higher_is_better(metric) else min
        top = choose(rows, key=lambda row: row["mean"])
        number = with_unit(metric, top["mean"] / (100 if in_percent(metric) else 1))
        where = f" on {split}" if len(files.study.splits) > 1 else ""
        yield f"The best {metric}{where} is {number}, of {top['method']} (mean of {_count(top['runs'], 'run')})."


def _facts(files: StudyFiles) -> Iterator[tuple[str, str]]:
    status = Counter(files.status(cell) for cell in files.cells)
    diverged = f", of them {status['diverged']} diverged" if status["diverged"] else ""
    yield "runs finished", f"{status['finished'] + status['diverged']} of {len(files.cells)}{diverged}"
    if rounds := [run.config.num_server_rounds for _, run in files.runs]:
        yield "rounds of a run", " to ".join(map(str, _bounds(rounds)))
    moved = sum(run.totals.get(key, 0) for _, run in files.runs for key in ("bytes-down", "bytes-up"))
    yield "floats sent and received", size(moved)
    yield "time of all runs", duration(sum(run.seconds for _, run in files.runs))


def _bounds(values: list[int]) -> list[int]:
    return sorted({min(values), max(values)})


def _warnings(files: StudyFiles) -> list[str]:
    by_status: dict[str, list[Cell]] = {}
    for cell in files.cells:
        by_status.setdefault(files.status(cell), []).append(cell)
    found = []
    for status, text in (
        ("diverged", "Diverged, and left out of the means"),
        ("failed", "Failed, and left out of the means"),
        ("running", "Begun and not finished"),
        ("to repeat", "Begun with other settings than the study's, and left out; a sweep repeats them"),
        ("not begun", "Not begun"),
    ):
        if cells := by_status.get(status):
            names = ", ".join(cell.name for cell in cells[:6])
            names += f" and {len(cells) - 6} more" if len(cells) > 6 else ""
            found.append(f"{text}: {len(cells)} of {len(files.cells)} runs ({names}).")
    return found


def settings_section(files: StudyFiles) -> Section:
    """Return the settings of all runs, and those that differ between methods and splits."""
    runs: dict[tuple[str, str], RunFiles] = {}
    for cell, run in files.runs:
        runs.setdefault((cell.method, cell.split), run)
    first = {pair: run.chosen for pair, run in runs.items()}
    everything = list(first.values())
    keys = list(dict.fromkeys(key for chosen in everything for key in chosen if key != "seed"))
    missing = object()
    shared = [key for key in keys if all(chosen.get(key, missing) == everything[0].get(key) for chosen in everything)]
    differ = [key for key in keys if key not in shared]
    blocks: list[Block] = [
        Table(["setting of all runs", "value"], [[key, setting(everything[0][key])] for key in shared])
    ]
    if differ:
        head = ["method", *(["split"] if len(files.study.splits) > 1 else []), *differ]
        rows = [
            [m, *([s] if len(files.study.splits) > 1 else []), *(setting(first[m, s].get(k, "-")) for k in differ)]
            for m, s in ((m, s) for s in files.study.splits for m in files.study.methods if (m, s) in first)
        ]
        blocks.append(Table(head, rows, "Settings that differ; - is the default, or what follows from the others"))
    if (tuning := files.folder / "tuning.md").is_file():
        scores = Code(tuning.read_text(encoding="utf-8"))
        blocks.append(More("How settings were chosen: the scores of the trials on validation examples", [scores]))
    seeds = ", ".join(map(str, files.study.seeds))
    blocks.append(Text(f"Seeds: {seeds}. Every other setting has its default.", "note"))
    return Section("settings", "Settings", blocks)


def split_section(files: StudyFiles) -> Section | None:
    """Return the class-by-client picture of each split, of the first seed; several where methods have their own."""
    blocks: list[Block] = []
    for split in files.study.splits:
        first: dict[str, RunFiles] = {}
        for cell, run in files.runs:
            if cell.split == split:
                first.setdefault(cell.method, run)
        pictures: dict[str, list[str]] = {}
        protected = [method for method, run in first.items() if run.config.protected]  # the others' data are the same
        for method in protected[:1] or first:
            pictures.setdefault(str(first[method].json("split.json")), []).append(method)
        for methods in pictures.values():
            run = first[methods[0]]
            about = [split] * (len(files.study.splits) > 1) + methods * (len(pictures) > 1)
            blocks += split_figures(run, "".join(f", {name}" for name in (*about, f"seed {run.config.seed}")))
    return Section("split", "Data of the clients", blocks) if blocks else None


def runs_section(files: StudyFiles) -> Section:
    """Return every run, method by method: results, warnings and the command that repeats it."""
    blocks: list[Block] = []
    for split in files.study.splits:
        for method in files.study.methods:
            cells = [cell for cell in files.cells if (cell.method, cell.split) == (method, split)]
            if cells:
                name = method + (f", {split}" if len(files.study.splits) > 1 else "")
                blocks.append(More(name, _runs_of(files, cells), anchor_of(method, split)))
    return Section("runs", "Runs", blocks)


def _runs_of(files: StudyFiles, cells: list[Cell]) -> list[Block]:
    runs = {cell.name: run for cell, run in files.runs}
    begun = [runs[cell.name] for cell in cells if cell.name in runs]
    key = begun[0].headline if begun else ""
    rows, warned = [], dict[str, list[str]]()
    for cell in cells:
        run, status = runs.get(cell.name), files.status(cell)
        if status == "failed" and (error := failure_of(cell, files.folder).get("error")):
            warned.setdefault(f"failed: {error}", []).append(str(cell.seed))
        if run is None:
            rows.append([str(cell.seed), status, *["-"] * 5])
            continue
        for text in run_warnings(run) if run.summary else ():
            warned.setdefault(text, []).append(str(cell.seed))
        numbers = [run.final.get(key), run.best.get(key)]
        shown = ["-" if value is None else f"{scaled(key, value):{form_of(key)}}" for value in numbers]
        done, sha256 = [str(run.rounds), duration(run.seconds)], str(run.summary.get("sha256", "-"))[:16]
        rows.append([str(cell.seed), status, *shown, *done, sha256])
    head = ["seed", "status", f"final {key}{unit_of(key)}", "best", "rounds", "time", "SHA-256, first 16 digits"]
    blocks: list[Block] = [Table(head, rows)]
    if begun:
        blocks.insert(0, Text(f"{method_name(begun[0].config)}, {begun[0].config.model} on {begun[0].config.dataset}."))
        blocks.append(Code(command(begun[0])))
    notes = [f"Seed {', '.join(seeds)}: {text}" for text, seeds in warned.items()]
    return [*blocks, Listing(notes)] if notes else blocks


def reproduce_section(files: StudyFiles) -> Section:
    """Return the study's file, the command, and the versions."""
    text = (files.folder / STUDY_FILE).read_text(encoding="utf-8")
    blocks: list[Block] = [
        Text(f"Save the file below as {STUDY_FILE}. The commands above are of one run of each method."),
        Code(f"fedbn-flwr sweep {STUDY_FILE} --out runs/again"),
        More(STUDY_FILE, [Code(text)]),
    ]
    found: dict[str, list[str]] = {}
    for _, run in files.runs:
        for name, version in run.summary.get("versions", {}).items():
            if version not in found.setdefault(name, []):
                found[name].append(version)
    if found:
        blocks.append(Table(["package", "version"], [[name, ", ".join(all_)] for name, all_ in found.items()]))
    if mixed := [name for name, versions in found.items() if len(versions) > 1]:
        blocks.append(Text(f"The runs were done with several versions of {', '.join(mixed)}.", "warning"))
    return Section("reproduce", "Reproduce", blocks)
