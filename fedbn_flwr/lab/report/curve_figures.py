"""The curves of a run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedbn_flwr.lab.output.definitions import CLIENTS, HELD_OUT
from fedbn_flwr.lab.report.figures import UNITS, Mark, Series, curves
from fedbn_flwr.lab.report.page import Figure, Section, Switch, Table, Text
from fedbn_flwr.lab.report.run_files import RunFiles
from fedbn_flwr.lab.report.shown import MEANS, metric, scaled, thinned, title_of, with_unit_of
from fedbn_flwr.lab.studies.rows import grouped
from fedbn_flwr.messages.protocol import VALIDATION
from fedbn_flwr.training.tasks import quantity_of

__all__ = ["SWITCH", "by_round", "curves_section", "marks", "test_of"]

Column = tuple[Sequence[Any], Sequence[float | None]]
SWITCH = Switch([(unit, unit) for unit in UNITS])
_TESTS = ("test-", "personal-", f"{VALIDATION}-", f"{HELD_OUT}-", "train-")


def curves_section(run: RunFiles) -> Section:
    """Return a figure for each quantity: the main one first, the loss last."""
    keys = dict.fromkeys(key for line in run.lines for key in line if not key.endswith((CLIENTS, *MEANS)))
    in_order = [key for test in _TESTS for key in keys if key.startswith(test)]
    quantities = grouped(in_order, quantity_of)
    if not quantities:
        return Section("curves", "Curves", [Text(run.lost or "No round is finished yet.")])
    main = quantity_of(run.headline)
    ordered = sorted(quantities, key=lambda name: (name != main, name == "loss", name))
    text = "Exchanges and bytes are those of training: one broadcast counts once, and bytes are those of floats."
    figures = [_curves(run, name, quantities[name]) for name in ordered]
    return Section("curves", "Curves", [SWITCH, *figures, Text(text, "note")])


def test_of(key: str) -> str:
    """Return on what a figure is measured: "test-recalibrated" of "test-recalibrated-accuracy"."""
    return key.removesuffix(f"-{quantity_of(key)}")


def _curves(run: RunFiles, quantity: str, keys: Sequence[str]) -> Figure:
    name = with_unit_of(quantity)
    series = []
    for style, key in enumerate(keys):
        series.append(Series(test_of(key), run.over, [scaled(key, line.get(key)) for line in run.lines], style))
    tested = [line for line in run.lines if any(line.get(key) is not None for key in keys)]
    rows = []
    for line in thinned(tested):
        cells = [metric(key, line.get(key)) for key in keys]
        rows.append([str(line["round"]), *cells])
    left_out = len(tested) - len(rows)
    caption = f"{name} by round" + (f"; {left_out} rounds in between are left out" if left_out else "")
    last = ", ".join(f"{test_of(key)} {metric(key, run.final.get(key))}" for key in keys)
    label = f"Curves of {name} over {len(run.lines)} rounds. Last values: {last}."
    numbers = Table(["round", *map(test_of, keys)], rows, caption)
    return Figure(curves(series, name, marks(run)), label, title_of(quantity), numbers)


def by_round(columns: Mapping[str, Column], shown: Callable[[float | None], str], caption: str = "") -> Table:
    """Return a table with a row for each round; of many rounds some are left out.

    Args:
        columns: by name, the rounds of a column and its value in each.
        shown: returns a value as text.
        caption: that of the table.
    """
    values = [dict(zip(rounds, numbers, strict=True)) for rounds, numbers in columns.values()]
    rows = []
    for server_round in thinned(sorted(set[int]().union(*values))):
        cells = [shown(column.get(server_round)) for column in values]
        rows.append([str(server_round), *cells])
    return Table(["round", *columns], rows, caption)


def marks(run: RunFiles) -> list[Mark]:
    """Return a line after the last round of each phase, where the phase changes, and one at a divergence."""
    names = {}
    for at, (line, after) in enumerate(itertools.pairwise(run.lines)):
        if line.get("phase") != after.get("phase"):
            frozen = after.get("phase") == "frozen"
            names[at] = f"T* = {line['round']}" if frozen else f"{after.get('phase')} from {after['round']}"
    diverged = [at for at, line in enumerate(run.lines) if "diverged" in line]
    places = [*names.items(), *((at, "diverged") for at in diverged[:1])]
    return [Mark(name, {unit: over[at] for unit, over in run.over.items()}) for at, name in places]
