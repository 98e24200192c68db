"""The curves of a run."""

from __future__ import annotations

from collections.abc import Sequence

from fedbn_flwr.lab.output.definitions import CLIENTS, HELD_OUT
from fedbn_flwr.lab.report.figures import BYTES, EXCHANGES, ROUNDS, Mark, Series, curves
from fedbn_flwr.lab.report.page import Figure, Section, Switch, Table, Text
from fedbn_flwr.lab.report.run_files import RunFiles
from fedbn_flwr.lab.report.shown import MEANS, metric, scaled, thinned, title_of, unit_of
from fedbn_flwr.messages.protocol import VALIDATION
from fedbn_flwr.training.tasks import quantity_of

__all__ = ["UNITS", "curves_section", "marks", "test_of"]

UNITS = ((ROUNDS, "rounds"), (EXCHANGES, "exchanges"), (BYTES, "bytes"))
_TESTS = ("test-", "personal-", f"{VALIDATION}-", f"{HELD_OUT}-", "train-")


def curves_section(run: RunFiles) -> Section:
    """Return a figure for each quantity: the main one first, the loss last."""
    keys = list(dict.fromkeys(key for line in run.lines for key in line if key.startswith(_TESTS)))
    keys = [key for key in keys if not key.endswith((CLIENTS, *MEANS))]
    quantities: dict[str, list[str]] = {}
    for key in sorted(keys, key=lambda key: [key.startswith(prefix) for prefix in _TESTS].index(True)):
        quantities.setdefault(quantity_of(key), []).append(key)
    main = quantity_of(run.headline)
    ordered = sorted(quantities, key=lambda name: (name != main, name == "loss", name))
    figures = [_curves(run, name, quantities[name]) for name in ordered]
    if not figures:
        return Section("curves", "Curves", [Text(run.lost or "No round is finished yet.")])
    note = Text(
        "Exchanges and bytes are those of training: one broadcast counts once, and bytes are those of floats.", "note"
    )
    return Section("curves", "Curves", [Switch(UNITS), *figures, note])


def test_of(key: str) -> str:
    """Return on what a figure is measured: "test-recalibrated" of "test-recalibrated-accuracy"."""
    return key.removesuffix(f"-{quantity_of(key)}")


def _curves(run: RunFiles, quantity: str, keys: Sequence[str]) -> Figure:
    series = [
        Series(
            name=test_of(key),
            over=run.over,
            values=[scaled(key, line.get(key)) for line in run.lines],
            style=at,
        )
        for at, key in enumerate(keys)
    ]
    shown = [line for line in run.lines if any(line.get(key) is not None for key in keys)]
    head = ["round", *(one.name for one in series)]
    rows = [[str(line["round"]), *(metric(key, line.get(key)) for key in keys)] for line in thinned(shown)]
    left = len(shown) - len(rows)
    caption = f"{quantity}{unit_of(quantity)} by round" + (f"; {left} rounds in between are left out" if left else "")
    last = ", ".join(f"{one.name} {metric(key, run.final.get(key))}" for one, key in zip(series, keys, strict=True))
    label = f"Curves of {quantity}{unit_of(quantity)} over {len(run.lines)} rounds. Last values: {last}."
    drawing = curves(series, f"{quantity}{unit_of(quantity)}", marks(run))
    return Figure(drawing, label, title_of(quantity), Table(head, rows, caption))


def marks(run: RunFiles) -> list[Mark]:
    """Return a line after the last round of each phase, where the phase changes, and one at a divergence."""
    found = []
    for at, (line, after) in enumerate(zip(run.lines, run.lines[1:], strict=False)):
        if line.get("phase") != after.get("phase"):
            frozen = after.get("phase") == "frozen"
            name = f"T* = {line['round']}" if frozen else f"{after.get('phase')} from {after['round']}"
            found.append(Mark(name, {unit: places[at] for unit, places in run.over.items()}))
    since = next((at for at, line in enumerate(run.lines) if "diverged" in line), None)
    if since is not None:
        found.append(Mark("diverged", {unit: places[since] for unit, places in run.over.items()}))
    return found
