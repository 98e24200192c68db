"""The BatchNorm picture of a study: FixBN's Fig. 3 (a) for each method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fedbn_flwr.doctor.history import MAX_CLIENTS
from fedbn_flwr.lab.files import read_metrics
from fedbn_flwr.lab.output.folder import STATISTICS_FILE
from fedbn_flwr.lab.report.figures import UNITS, Series
from fedbn_flwr.lab.report.page import Figure, Section, Table, Text
from fedbn_flwr.lab.report.shown import thinned
from fedbn_flwr.lab.report.statistics import curves_by_round, l1_means, shown
from fedbn_flwr.lab.report.study_files import StudyFiles

__all__ = ["statistics_section"]

_TITLES = (
    "Distance of the clients' statistics from the global ones, mean over the clients",
    "Change of the global statistics in a round",
)

Numbers = Sequence[float | None]
Norms = tuple[list[int], tuple[Numbers, Numbers]]
"""The recorded rounds, and the two norms of each."""


def statistics_section(files: StudyFiles) -> Section | None:
    """Return for each split the two norms of each method; None if no run has recorded its statistics."""
    found: dict[tuple[str, str], Norms] = {}
    seeds: dict[int, None] = {}
    for cell, run in files.runs:
        if (cell.split, cell.method) not in found and (lines := read_metrics(run.folder / STATISTICS_FILE)):
            found[cell.split, cell.method] = ([line["round"] for line in lines], l1_means(lines))
            seeds[cell.seed] = None
    if not found:
        return None
    text = (
        "L1 norms, summed over the layers (FixBN, Fig. 3 a). Far apart, BatchNorm normalises with other numbers in "
        f"training than in tests. Of each method the first run that has recorded them, of seed "
        f"{', '.join(map(str, seeds))}. With more than {MAX_CLIENTS} clients the median stands for the mean. A round "
        "without a value tracked no statistics, as after T* of FixBN."
    )
    absent = dict.fromkeys(f"{c.method}, {c.split}" for c in files.cells if (c.split, c.method) not in found)
    notes = [Text(f"Without statistics: {'; '.join(absent)}.", "note")] if absent else []
    figures = [figure for split in files.study.splits for figure in _figures(files, split, found)]
    return Section("batchnorm", "BatchNorm", [Text(text), *figures, *notes])


def _figures(files: StudyFiles, split: str, found: Mapping[tuple[str, str], Norms]) -> Iterator[Figure]:
    own = {method: found[split, method] for method in files.study.methods if (split, method) in found}
    for at, title in enumerate(_TITLES if own else ()):
        title += f", {split}" if len(files.study.splits) > 1 else ""
        series, columns = [], []
        for method, (rounds, norms) in own.items():
            values = [value or None for value in norms[at]]  # 0 has no logarithm
            style = list(files.study.methods).index(method)
            series.append(Series(method, dict.fromkeys(UNITS, rounds), values, style))
            columns.append(dict(zip(rounds, norms[at], strict=True)))
        drawing = curves_by_round(series, "L1 norm", log=True)
        drawing["layout"]["showlegend"] = True  # also of one method: not all have statistics
        everything = thinned(sorted({server_round for column in columns for server_round in column}))
        rows = [[str(r), *(shown(column.get(r)) for column in columns)] for r in everything]
        last = "; ".join(f"{method} {shown(norms[at][-1])}" for method, (_, norms) in own.items())
        yield Figure(drawing, f"{title}. Last values: {last}.", title, Table(["round", *own], rows))
