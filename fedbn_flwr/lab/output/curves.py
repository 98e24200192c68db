"""Curves of a run: score and loss over rounds, and epsilon if the run has it."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

EPSILON = "epsilon"  # a key in metrics.jsonl; see privacy.differential
_TESTS = ("test-", "personal-", "train-")


def draw_curves(lines: Sequence[Mapping[str, Any]], score: str) -> bytes:
    """Return a PNG of a run's curves.

    Args:
        lines: the lines of ``metrics.jsonl``.
        score: the metric that is drawn in addition to the loss.
    """
    # Import here, because matplotlib takes half a second. Do not use pyplot, because
    # pyplot needs a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    keys = dict.fromkeys(itertools.chain.from_iterable(lines))
    panels = [score, "loss"]
    if EPSILON in keys:
        panels.append(EPSILON)
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    FigureCanvasAgg(figure)
    frozen = [line["round"] for line in lines if line.get("phase") == "frozen"]
    for axis, label in zip(figure.subplots(1, len(panels)), panels, strict=True):
        # Draw a curve for every test with the panel's metric. A test need not be in
        # every round.
        for key in keys:
            is_test = key.startswith(_TESTS) and key.endswith(f"-{label}")
            measured = [line for line in lines if line.get(key) is not None]
            if not measured or not (key == label or is_test):
                continue
            rounds = [line["round"] for line in measured]
            values = [line[key] for line in measured]
            style = "--" if key.startswith("train") else "-"
            # Mark the points of a short curve, because a single point has no line.
            marker = "o" if len(rounds) < 4 else ""
            axis.plot(rounds, values, style, label=key, linewidth=1.3, marker=marker)
        # Mark the round of the freeze of BatchNorm.
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
