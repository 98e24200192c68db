"""The report of a study."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fedbn_flwr.lab.files import STUDY_FILE
from fedbn_flwr.lab.report.files import RunFiles, StudyFiles
from fedbn_flwr.lab.report.page import Block, Code, Facts, Listing, More, Page, Section, Table, Text
from fedbn_flwr.lab.report.run import command, method_name, run_warnings
from fedbn_flwr.lab.report.run_figures import split_figures
from fedbn_flwr.lab.report.shown import duration, form_of, in_percent, scaled, setting, size, with_unit, with_unit_of
from fedbn_flwr.lab.report.study_figures import (
    comparison_section,
    curves_section,
    domains_section,
)
from fedbn_flwr.lab.report.study_statistics import statistics_section
from fedbn_flwr.lab.report.study_tables import anchor_of, results_section
from fedbn_flwr.lab.studies.comparisons import LEVEL, comparisons
from fedbn_flwr.lab.studies.one_run import failure_of
from fedbn_flwr.lab.studies.rows import grouped, with_std
from fedbn_flwr.lab.studies.study import Cell
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
        curves_section(files),
        results_section(files),
        comparison_section(files),
        domains_section(files),
        statistics_section(files),
        split_section(files),
        runs_section(files),
        settings_section(files),
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
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _sentence(files: StudyFiles) -> str:
    study = files.study
    splits = f", {len(study.splits)} splits" if len(study.splits) > 1 else ""
    seeds, runs = _count(len(study.seeds), "seed"), _count(len(files.cells), "run")
    grid = f"{_count(len(study.methods), 'method')}{splits} and {seeds}: {runs}."
    best = list(_best(files))
    return " ".join([grid, *best]) if len(best) <= 2 else grid


def _best(files: StudyFiles) -> Iterator[str]:
    """Yield for each split and metric the method with the best mean, and whether its lead is established.

    It is where the correction for all pairs of the split (Holm) leaves a difference from another method.
    """
    compared = [pair for pair in comparisons(files.rows) if pair["p-holm"] is not None]
    established = [pair for pair in compared if pair["p-holm"] < 1 - LEVEL]
    finished = [row for row in files.table if row["mean"] is not None]
    for (split, metric), rows in grouped(finished, lambda row: (row["split"], row["metric"])).items():
        if len(rows) < 2:
            continue
        choose, first = (max, "highest") if higher_is_better(metric) else (min, "lowest")
        top = choose(rows, key=lambda row: row["mean"])
        number = with_unit(metric, top["mean"] / (100 if in_percent(metric) else 1))
        where = f" on {split}" if len(files.study.splits) > 1 else ""
        reached = f"{number}, of {top['method']} (mean of {_count(top['runs'], 'run')})."
        mine = [p for p in established if p["split"] == split and metric in (p["metric"], p["other-metric"])]
        if any(top["method"] in (pair["method"], pair["other"]) for pair in mine):
            yield f"The best {metric}{where} is {reached}"
        else:
            what = "lead" if mine else "difference"
            yield f"No {what} in {metric}{where} is established. The {first} is {reached}"


def _facts(files: StudyFiles) -> Iterator[tuple[str, str]]:
    status = Counter(files.status(cell) for cell in files.cells)
    diverged = f", of them {status['diverged']} diverged" if status["diverged"] else ""
    yield "runs finished", f"{status['finished'] + status['diverged']} of {len(files.cells)}{diverged}"
    if rounds := [run.config.num_server_rounds for _, run in files.runs]:
        yield "rounds of a run", " to ".join(map(str, sorted({min(rounds), max(rounds)})))
    moved = sum(run.totals.get(key, 0) for _, run in files.runs for key in ("bytes-down", "bytes-up"))
    yield "floats sent and received", size(moved)
    yield "time of all runs", duration(sum(run.seconds for _, run in files.runs))


_INCOMPLETE = {
    "diverged": "Diverged, and left out of the means",
    "failed": "Failed, and left out of the means",
    "running": "Begun and not finished",
    "to repeat": "Begun with other settings than the study's, and left out; a sweep repeats them",
    "not begun": "Not begun",
}


def _warnings(files: StudyFiles) -> Iterator[str]:
    by_status = grouped(files.cells, files.status)
    for status, text in _INCOMPLETE.items():
        if cells := by_status.get(status):
            names = ", ".join(cell.name for cell in cells[:6])
            more = f" and {len(cells) - 6} more" if len(cells) > 6 else ""
            yield f"{text}: {len(cells)} of {len(files.cells)} runs ({names}{more})."


def settings_section(files: StudyFiles) -> Section:
    """Return the settings of all runs, and those that differ between methods and splits."""
    runs = {(cell.method, cell.split): run for cell, run in reversed(files.runs)}  # the first of each
    chosen = {pair: run.chosen for pair, run in runs.items()}
    shared, differ = [], []
    for key in dict.fromkeys(key for cell, _ in files.runs for key in chosen[cell.method, cell.split]):
        values = {setting(settings.get(key, "-")) for settings in chosen.values()}
        if key != "seed" and len(values) == 1:
            shared.append([key, *values])
        elif key != "seed":
            differ.append(key)
    blocks: list[Block] = [Table(["setting of all runs", "value"], shared)]
    if differ:
        rows = []
        for split in files.study.splits:
            for method in files.study.methods:
                if (method, split) in chosen:
                    where = [method, split] if len(files.study.splits) > 1 else [method]
                    rows.append(where + [setting(chosen[method, split].get(key, "-")) for key in differ])
        head = ["method", "split"] if len(files.study.splits) > 1 else ["method"]
        text = "Settings that differ; - is the default, or what follows from the others"
        blocks.append(Table(head + differ, rows, text))
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
            about = [split] if len(files.study.splits) > 1 else []
            about += methods if len(pictures) > 1 else []
            blocks += split_figures(run, "".join(f", {name}" for name in (*about, f"seed {run.config.seed}")))
    return Section("split", "Data of the clients", blocks) if blocks else None


def runs_section(files: StudyFiles) -> Section:
    """Return every run, method by method: results, warnings and the command that repeats it."""
    blocks: list[Block] = []
    cells = grouped(files.cells, lambda cell: (cell.split, cell.method))
    for split in files.study.splits:
        for method in files.study.methods:
            if (split, method) in cells:
                name = f"{method}, {split}" if len(files.study.splits) > 1 else method
                blocks.append(More(name, _runs_of(files, cells[split, method]), anchor_of(method, split)))
    return Section("runs", "Runs", blocks)


def _runs_of(files: StudyFiles, cells: list[Cell]) -> list[Block]:
    runs = {cell.name: run for cell, run in files.runs}
    begun = [runs[cell.name] for cell in cells if cell.name in runs]
    key = begun[0].headline if begun else ""
    rows = []
    warned: dict[str, list[str]] = {}
    for cell in cells:
        run, status = runs.get(cell.name), files.status(cell)
        if status == "failed" and (error := failure_of(cell, files.folder).get("error")):
            warned.setdefault(f"failed: {error}", []).append(str(cell.seed))
        if run is None:
            rows.append([str(cell.seed), status, *["-"] * 5])
            continue
        for text in run_warnings(run) if run.summary else ():
            warned.setdefault(text, []).append(str(cell.seed))
        final, best = (with_std(scaled(key, values.get(key)), None, form_of(key)) for values in (run.final, run.best))
        sha256 = str(run.summary.get("sha256", "-"))[:16]
        rows.append([str(cell.seed), status, final, best, str(run.rounds), duration(run.seconds), sha256])
    head = ["seed", "status", f"final {with_unit_of(key)}", "best", "rounds", "time", "SHA-256, first 16 digits"]
    blocks: list[Block] = [Table(head, rows)]
    if begun:
        config = begun[0].config
        what = Text(f"{method_name(config)}, {config.model} on {config.dataset}.")
        blocks = [what, *blocks, Code(command(begun[0]))]
    if warned:
        blocks.append(Listing([f"Seed {', '.join(seeds)}: {text}" for text, seeds in warned.items()]))
    return blocks


def reproduce_section(files: StudyFiles) -> Section:
    """Return the study's file, the command, and the versions."""
    text = (files.folder / STUDY_FILE).read_text(encoding="utf-8")
    blocks: list[Block] = [
        Text(f"Save the file below as {STUDY_FILE}. The commands above are of one run of each method."),
        Code(f"fedbn-flwr sweep {STUDY_FILE} --out runs/again"),
        More(STUDY_FILE, [Code(text)]),
    ]
    packages: dict[str, dict[str, None]] = {}
    for _, run in files.runs:
        for name, version in run.summary.get("versions", {}).items():
            packages.setdefault(name, {})[version] = None
    if packages:
        rows = [[name, ", ".join(versions)] for name, versions in packages.items()]
        blocks.append(Table(["package", "version"], rows))
    if mixed := [name for name, versions in packages.items() if len(versions) > 1]:
        blocks.append(Text(f"The runs were done with several versions of {', '.join(mixed)}.", "warning"))
    return Section("reproduce", "Reproduce", blocks)
