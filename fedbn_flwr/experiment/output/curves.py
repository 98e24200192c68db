"""Curves of runs: score and loss over rounds, and epsilon where a run has it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedbn_flwr.training.tasks import quantity_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_curves"]

EPSILON = "epsilon"  # in metrics.jsonl, see privacy.differential
_TESTS = (
    *("test", "test-batch", "personal-own", "personal-global", "test-averaged-bn", "test-recalibrated"),
    *("test-global-test-bn", "test-averaged-bn-test-bn"),
)


def draw_curves(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    title: str = "",
    score: str = "accuracy",
    headlines: Mapping[str, str] | None = None,
) -> bytes:
    """Return a PNG of the runs' curves.

    Args:
        runs: the lines of ``metrics.jsonl`` by name of the run. A single run shows all its metrics, several runs show
            one test of each.
        title: title of the picture.
        score: the metric beside the loss.
        headlines: the main metric of each of several runs, by name; its test is shown, and named where runs have
            different ones. Without it the first test.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    epsilon = any(line.get(EPSILON) is not None for lines in runs.values() for line in lines)
    panels = [(score, _curves(score)), ("loss", _curves("loss")), *([(EPSILON, [EPSILON])] if epsilon else [])]
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels))
    frozen = [line["round"] for lines in runs.values() for line in lines if line.get("phase") == "frozen"]
    tests = {name: key.removesuffix(f"-{quantity_of(key)}") for name, key in (headlines or {}).items()}
    mixed = len(set(tests.values())) > 1
    for axis, (label, keys) in zip(axes, panels, strict=True):
        for name, lines in runs.items():
            ordered = sorted(keys, key=lambda key: key != f"{tests.get(name)}-{label}")
            present = [key for key in ordered if any(line.get(key) is not None for line in lines)]
            for key in present if len(runs) == 1 else present[:1]:
                _plot(axis, lines, key, f"{name} ({tests[name]})" if mixed else name or key)
        if frozen and len(runs) == 1:
            axis.axvline(frozen[0], color="grey", linewidth=0.8, linestyle=":")
        axis.set_xlabel("server round")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if len(runs) == 1 and axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="small")
    if len(runs) > 1:  # both panels have the same names: one legend below them
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")
    if title:
        figure.suptitle(_as_it_is(title))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def _plot(axis: Axes, lines: Sequence[Mapping[str, Any]], key: str, label: str) -> None:
    """Draw a metric over the rounds that have it."""
    points = [(line["round"], line[key]) for line in lines if line.get(key) is not None]
    style = "--" if key.startswith("train") else "-"
    axis.plot(*zip(*points, strict=True), style, label=_as_it_is(label), linewidth=1.3)


def _as_it_is(name: str) -> str:
    """Return the name for matplotlib, which leaves out a label that begins with "_" and sets $...$ as a formula."""
    return f"{' ' * name.startswith('_')}{name}".replace("$", r"\$")


def _curves(label: str) -> list[str]:
    return [f"{name}-{label}" for name in (*_TESTS, "train")]
