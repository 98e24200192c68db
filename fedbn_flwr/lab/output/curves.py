"""Curves of a run: score and loss over rounds, and epsilon where the run has it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["draw_curves"]

EPSILON = "epsilon"  # in metrics.jsonl, see privacy.differential
_TESTS = ("test-", "personal-", "train-")


def draw_curves(lines: Sequence[Mapping[str, Any]], score: str) -> bytes:
    """Return a PNG of a run's curves.

    Args:
        lines: those of ``metrics.jsonl``.
        score: the metric beside the loss.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    keys = dict.fromkeys(key for line in lines for key in line)
    panels = [score, "loss", *(EPSILON for key in keys if key == EPSILON)]
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    FigureCanvasAgg(figure)
    frozen = [line["round"] for line in lines if line.get("phase") == "frozen"]
    for axis, label in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for key in keys:
            points = [
                (line["round"], line[key])
                for line in lines
                if line.get(key) is not None
            ]
            if not points or not (
                key == label or (key.startswith(_TESTS) and key.endswith(f"-{label}"))
            ):
                continue
            style = "--" if key.startswith("train") else "-"
            axis.plot(*zip(*points, strict=True), style, label=key, linewidth=1.3)
        if frozen:
            axis.axvline(frozen[0], color="grey", linewidth=0.8, linestyle=":")
        axis.set(xlabel="server round", ylabel=label)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()
