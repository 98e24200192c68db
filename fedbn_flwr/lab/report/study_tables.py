"""The tables of a study's results and costs, beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedbn_flwr.lab.report.files import StudyFiles
from fedbn_flwr.lab.report.page import Cell, Link, Section, Table, Text
from fedbn_flwr.lab.report.shown import MEBIBYTE, form_of, in_percent, with_unit_of
from fedbn_flwr.lab.report.study_figures import dots_figures
from fedbn_flwr.lab.studies.rows import grouped, with_std
from fedbn_flwr.lab.studies.tables import shown_runs

__all__ = ["anchor_of", "results_section"]

Columns = list[tuple[str, Callable[[Mapping[str, Any]], Cell]]]
"""The head of each column, and what gives a row's cell."""


def results_section(files: StudyFiles) -> Section:
    """Return the table of means beside the paper's numbers, and the plot of all runs."""
    rows = files.table
    if not rows:
        return Section("results", "Results", [Text("No run is finished yet.")])
    pairs = grouped(rows, lambda row: (row["method"], row["split"])).values()
    with_target = [next((row for row in pair if row["target"] is not None), pair[0]) for pair in pairs]
    results, costs = _columns(files)
    table, cost = _table(results, rows), _table(costs, with_target, "Cost of a run, mean over the seeds")
    notes = [
        "Final: the last round (with early stopping the best one by validation), mean ± sample standard deviation over "
        "n seeds. Best: the best round, which no run knows beforehand.",
    ]
    target = (
        "To it: rounds, exchanges and floats until the main metric first reached the target, as the mean of the seeds "
        "that reached it."
    )
    more = [Text(target, "note")] if any(row["target"] is not None for row in rows) else []
    if any(row["paper"] is not None for row in rows):
        notes.append("Difference: final minus the paper's number.")
    return Section("results", "Results", [table, Text(" ".join(notes), "note"), *dots_figures(files), cost, *more])


def _table(columns: Columns, rows: Sequence[Mapping[str, Any]], caption: str = "") -> Table:
    return Table([head for head, _ in columns], [[cell(row) for _, cell in columns] for row in rows], caption)


def _columns(files: StudyFiles) -> tuple[Columns, Columns]:
    """Return the columns of results and of costs that this study needs: a head, and what gives a row's cell."""
    rows = files.table
    shares = {in_percent(row["metric"] or "") for row in rows}
    unit = " (%)" if shares == {True} else ""

    def number(key: str, std: str = "", form: str = "", sign: str = "") -> Any:
        return lambda row: with_std(row[key], row.get(std), form or sign + form_of(row["metric"] or ""))

    def count(key: str) -> Any:
        return lambda row: "-" if row[key] is None else f"{row[key]:,.1f}".removesuffix(".0")

    about: Columns = [("method", lambda row: Link(row["method"], anchor_of(row["method"], row["split"])))]
    if len(files.study.splits) > 1:
        about.append(("split", lambda row: row["split"]))
    results = [
        *about,
        (f"final{unit}", number("mean", "std")),
        ("n", shown_runs),
        (f"best{unit}", number("best-mean", "best-std")),
    ]
    if any(row["paper"] is not None for row in rows):
        results += [
            (f"paper{unit}", number("paper", "paper-std")),
            ("difference", number("difference", sign="+")),
        ]
    if len({row["metric"] for row in rows}) > 1:
        name = with_unit_of if len(shares) > 1 else str
        results.append(("metric", lambda row: name(row["metric"]) if row["metric"] else "-"))
    costs = [*about, ("rounds", count("rounds")), ("exchanges", count("exchanges"))]
    costs.append(("MiB of floats", number("megabytes", form=",.2f")))
    if any(row["target"] is not None for row in rows):
        costs += [
            ("target", number("target", form="g")),
            ("reached by", count("reached")),
            ("rounds to it", count("rounds-to-target")),
            ("exchanges to it", count("exchanges-to-target")),
            ("MiB to it", _mebibytes_to_target),
        ]
    return results, costs


def _mebibytes_to_target(row: Mapping[str, Any]) -> str:
    return "-" if row["bytes-to-target"] is None else f"{row['bytes-to-target'] / MEBIBYTE:,.2f}"


def anchor_of(method: str, split: str) -> str:
    """Return the anchor of a method's runs: letters and digits of the names as they are, others by their number."""
    text = f"{method}/{split}"
    return "runs-" + "".join(c if c.isalnum() and c.isascii() else f"-{ord(c):x}-" for c in text)
