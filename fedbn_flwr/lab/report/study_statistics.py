"""The BatchNorm picture of a study: FixBN's Fig. 3 (a) for each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedbn_flwr.lab.files import read_metrics
from fedbn_flwr.lab.output.folder import STATISTICS_FILE
from fedbn_flwr.lab.report.figures import UNITS, Series
from fedbn_flwr.lab.report.files import StudyFiles
from fedbn_flwr.lab.report.page import Block, Figure, Section, Text
from fedbn_flwr.lab.report.run_figures import by_round
from fedbn_flwr.lab.report.statistics import curves_by_round, l1_means, shown

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
    recorded: dict[tuple[str, str], Norms] = {}
    seeds: dict[int, None] = {}
    for cell, run in files.runs:
        if (cell.split, cell.method) not in recorded and (lines := read_metrics(run.folder / STATISTICS_FILE)):
            recorded[cell.split, cell.method] = ([line["round"] for line in lines], l1_means(lines))
            seeds[cell.seed] = None
    if not recorded:
        return None
    text = (
        "L1 norms, summed over the layers (FixBN, Fig. 3 a). Far apart, BatchNorm normalises with other numbers in "
        f"training than in tests. Of each method the first run that has recorded them, of seed "
        f"{', '.join(map(str, seeds))}. A round "
        "without a value tracked no statistics, as after T* of FixBN."
    )
    blocks: list[Block] = [Text(text)]
    for split in files.study.splits:
        of_split = {method: recorded[split, method] for method in files.study.methods if (split, method) in recorded}
        if of_split:
            where = f", {split}" if len(files.study.splits) > 1 else ""
            blocks += [_figure(files, of_split, at, title + where) for at, title in enumerate(_TITLES)]
    absent = dict.fromkeys(f"{c.method}, {c.split}" for c in files.cells if (c.split, c.method) not in recorded)
    if absent:
        blocks.append(Text(f"Without statistics: {'; '.join(absent)}.", "note"))
    return Section("batchnorm", "BatchNorm", blocks)


def _figure(files: StudyFiles, methods: Mapping[str, Norms], at: int, title: str) -> Figure:
    """Return one of the two norms of the methods."""
    series = []
    for method, (rounds, norms) in methods.items():
        drawn = [value or None for value in norms[at]]  # 0 has no logarithm
        style = list(files.study.methods).index(method)
        series.append(Series(method, dict.fromkeys(UNITS, rounds), drawn, style))
    drawing = curves_by_round(series, "L1 norm", log=True)
    drawing["layout"]["showlegend"] = True  # also of one method: not all have statistics
    columns = {method: (rounds, norms[at]) for method, (rounds, norms) in methods.items()}
    last = "; ".join(f"{method} {shown(values[-1])}" for method, (_, values) in columns.items())
    return Figure(drawing, f"{title}. Last values: {last}.", title, by_round(columns, shown))
