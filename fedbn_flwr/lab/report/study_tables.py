"""The tables of a study's results and costs, beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedbn_flwr.lab.report.page import Link, Section, Table, Text
from fedbn_flwr.lab.report.shown import MEBIBYTE, form_of, in_percent, unit_of
from fedbn_flwr.lab.report.study_figures import dots_figures
from fedbn_flwr.lab.report.study_files import StudyFiles
from fedbn_flwr.lab.studies.numbers import with_std
from fedbn_flwr.lab.studies.tables import shown_runs

__all__ = ["anchor_of", "results_section"]


def results_section(files: StudyFiles) -> Section:
    """Return the table of means beside the paper's numbers, and the plot of all runs."""
    rows = files.table
    if not rows:
        return Section("results", "Results", [Text("No run is finished yet.")])
    by_pair: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_pair.setdefault(_pair(row), []).append(row)
    first = [next((row for row in own if row["target"] is not None), own[0]) for own in by_pair.values()]
    results, costs = _columns(files)
    table = Table([name for name, _ in results], [[cell(row) for _, cell in results] for row in rows])
    cost = Table(
        [name for name, _ in costs],
        [[cell(row) for _, cell in costs] for row in first],
        "Cost of a run, mean over the seeds",
    )
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


def _pair(row: Mapping[str, Any]) -> tuple[Any, Any]:
    return row.get("method"), row.get("split")


def _columns(files: StudyFiles) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Return the columns of results and of costs that this study needs: a head, and what gives a row's cell."""
    rows = files.table
    shares = {in_percent(row["metric"] or "") for row in rows}
    unit = " (%)" if shares == {True} else ""

    def number(key: str, std: str = "", form: str = "", sign: str = "") -> Any:
        def cell(row: dict[str, Any]) -> str:
            places = form or sign + form_of(row["metric"] or "")
            return with_std(row[key], row[std] if std else None, places)

        return cell

    def count(key: str) -> Any:
        return lambda row: "-" if row[key] is None else f"{row[key]:,.1f}".removesuffix(".0")

    about: list[tuple[str, Any]] = [("method", lambda row: Link(row["method"], anchor_of(row["method"], row["split"])))]
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
        mixed = len(shares) > 1
        results.append(("metric", lambda row: (row["metric"] or "-") + unit_of(row["metric"] or "") * mixed))
    costs = [*about, ("rounds", count("rounds")), ("exchanges", count("exchanges"))]
    costs.append(("MiB of floats", number("megabytes", form=",.2f")))
    if any(row["target"] is not None for row in rows):
        costs += [("target", number("target", form="g")), ("reached by", count("reached"))]
        costs += [("rounds to it", count("rounds-to-target"))]
        costs += [("exchanges to it", count("exchanges-to-target"))]
        costs.append(("MiB to it", lambda r: "-" if (m := r["bytes-to-target"]) is None else f"{m / MEBIBYTE:,.2f}"))
    return results, costs


def anchor_of(method: str, split: str) -> str:
    """Return the anchor of a method's runs: letters and digits of the names as they are, others by their number."""
    text = f"{method}/{split}"
    return "runs-" + "".join(c if c.isalnum() and c.isascii() else f"-{ord(c):x}-" for c in text)
