"""Curves of runs: score and loss over rounds, and epsilon where a run has it."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedbn_flwr.training.tasks import quantity_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_curves"]

_LETTERS = 72  # of a legend's row below a panel
EPSILON = "epsilon"  # in metrics.jsonl, see privacy.differential
_TESTS = (
    "test",
    "test-batch",
    "test-global-train",
    "personal-own",
    "personal-global",
    "test-averaged-bn",
    "test-recalibrated",
    "test-global-test-bn",
    "test-averaged-bn-test-bn",
)


def draw_curves(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    title: str = "",
    scores: Sequence[str] = ("accuracy",),
    headlines: Mapping[str, str] | None = None,
) -> bytes:
    """Return a PNG of the runs' curves.

    Args:
        runs: the lines of ``metrics.jsonl`` by name of the run. A single run shows all its metrics, several runs show
            one test of each.
        title: title of the picture.
        scores: the metrics beside the loss, a panel each.
        headlines: the main metric of each of several runs, by name; its test is shown, and named where runs have
            different ones. Without it the first test.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    every_line = [*itertools.chain.from_iterable(runs.values())]
    panels = [(label, _curves(label)) for label in (*scores, "loss")]
    if _has(every_line, EPSILON):
        panels.append((EPSILON, [EPSILON]))
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    frozen = [line["round"] for line in every_line if line.get("phase") == "frozen"]
    tests = {name: key.removesuffix(f"-{quantity_of(key)}") for name, key in (headlines or {}).items()}
    mixed = len(set(tests.values())) > 1
    for axis, (label, keys) in zip(axes, panels, strict=True):
        for at, (name, lines) in enumerate(runs.items()):
            main = f"{tests.get(name)}-{label}"
            present = [key for key in keys if _has(lines, key)]
            present = [key for key in present if key == main] + [key for key in present if key != main]
            for key in present if len(runs) == 1 else present[:1]:
                shown = f"{name} ({tests[name]})" if mixed else name or key
                _plot(axis, lines, key, shown, at if len(runs) > 1 else None)
        if frozen and len(runs) == 1:
            axis.axvline(frozen[0], color="grey", linewidth=0.8, linestyle=":")
        axis.set_xlabel("server round")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if len(runs) == 1 and axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="small")
    if len(runs) > 1:  # a run has one colour in all panels: one legend below them
        handles: dict[str, Any] = {}
        for axis in axes:
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        longest = max(map(len, handles), default=1)
        columns = max(1, min(5, _LETTERS * len(panels) // (longest + 8)))
        figure.legend([*handles.values()], [*handles], loc="outside lower center", ncols=columns, fontsize="small")
    if title:
        figure.suptitle(_as_it_is(title))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def _has(lines: Sequence[Mapping[str, Any]], key: str) -> bool:
    return any(line.get(key) is not None for line in lines)


def _plot(axis: Axes, lines: Sequence[Mapping[str, Any]], key: str, label: str, at: int | None) -> None:
    """Draw a metric over the rounds that have it: of the run with this number, or in the next colour."""
    points = [(line["round"], line[key]) for line in lines if line.get(key) is not None]
    style, order = ("--", 1.9) if key.startswith("train") else ("-", 2)  # one step a round makes a band of training
    colour = None
    if at is not None:  # ten colours, each in three dashes: 30 lines are distinct
        colour, style = f"C{at % 10}", ("-", "--", ":")[at // 10 % 3]
    axis.plot(*zip(*points, strict=True), style, label=_as_it_is(label), linewidth=1.3, color=colour, zorder=order)


def _as_it_is(name: str) -> str:
    """Return the name for matplotlib, which leaves out a label that begins with "_" and sets $...$ as a formula."""
    return f"{' ' * name.startswith('_')}{name}".replace("$", r"\$")


def _curves(label: str) -> list[str]:
    return [f"{name}-{label}" for name in (*_TESTS, "train")]
