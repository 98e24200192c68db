"""The pictures of the report, as inline SVG with real text."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd
from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# the colours of Okabe and Ito, with a darker yellow
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8a6d00", "#000000")
_DASHES = ("-", "--", ":", "-.")
_MARKERS = "o|xsv^D"
_NAME = 24
"""The most letters of a name in a picture."""

Curve = tuple[Sequence[int], Sequence[float]]
_Band = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class Point:
    """A row of a picture of points.

    Attributes:
        name: the name at the left.
        values: a value, or None, for each kind of point, in the order of the legend.
        low: the lower end of the interval of the first value, if it is known.
        high: the upper end.
    """

    name: str
    values: Sequence[float | None] = field(default=())
    low: float | None = None
    high: float | None = None


def short(name: str) -> str:
    """Return a name that fits into a picture."""
    return name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"


def rows(found: Sequence[Point], kinds: Sequence[str], label: str, caption: str) -> str:
    """Return a picture with a row of points for each site or method.

    Args:
        found: the rows, from top to bottom.
        kinds: the names of the points in each row, for the legend.
        label: label of the axis of values.
        caption: the text below.
    """

    def draw(axes: Axes) -> None:
        places = range(len(found), 0, -1)
        for place, row in zip(places, found, strict=True):
            if row.low is not None and row.high is not None:
                axes.hlines(place, row.low, row.high, color=_COLOURS[0], alpha=0.5)
        handles = []
        for at, kind in enumerate(kinds):
            # matplotlib leaves out NaN, a row without this point
            values = [row.values[at] for row in found]
            handles += axes.plot(
                [math.nan if value is None else value for value in values],
                list(places),
                color=_COLOURS[at % len(_COLOURS)],
                marker=_MARKERS[at % len(_MARKERS)],
                markerfacecolor=None if at == 0 else "none",
                linestyle="",
                label=kind.lstrip("_"),
            )
        axes.set_yticks(list(places), [short(row.name) for row in found], fontsize=8)
        axes.set_ylim(0.4, len(found) + 0.6)
        axes.set_xlabel(label)
        axes.grid(axis="x", color="#dddddd", linewidth=0.5)
        _legend(axes, handles, kinds)

    return _picture(draw, caption, 1.3 + 0.26 * len(found))


def curves(
    shown: Mapping[str, Curve],
    label: str,
    caption: str,
    *,
    thin: Sequence[Curve] = (),
    marks: Sequence[int] = (),
    bands: Mapping[str, _Band] | None = None,
    log: bool = False,
) -> str:
    """Return a picture of curves over the rounds.

    Args:
        shown: rounds and values by name.
        label: label of the axis of values.
        caption: the text below.
        thin: curves without a name, such as one of each site.
        marks: rounds that get a vertical line.
        bands: the lowest and highest values of some curves, by name.
        log: whether the axis of values is logarithmic.
    """
    # Imported here, because a command without pictures does not need matplotlib.
    from matplotlib.ticker import LogFormatter, MaxNLocator

    def draw(axes: Axes) -> None:
        for at_rounds, values in thin:
            axes.plot(at_rounds, values, color=_COLOURS[0], alpha=0.28, linewidth=0.9)
        # Curves also differ in dashes, because not everybody sees colours. A short
        # curve shows its points, because a single point has no line.
        handles = []
        for at, (name, (at_rounds, values)) in enumerate(shown.items()):
            colour = _COLOURS[at % len(_COLOURS)]
            handles += axes.plot(
                at_rounds,
                values,
                color=colour,
                linestyle=_DASHES[at % len(_DASHES)],
                linewidth=1.6,
                marker="o" if len(at_rounds) < 4 else "",
            )
            if bands and name in bands:
                low, high = bands[name]
                axes.fill_between(
                    at_rounds, low, high, color=colour, alpha=0.15, linewidth=0
                )
        for mark in marks:
            axes.axvline(mark, color="#888888", linewidth=0.8, linestyle=":")
        if log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            # Labels between the powers of ten, without mathtext, if there is room.
            axes.yaxis.set_minor_formatter(LogFormatter())
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("round")
        axes.set_ylabel(label)
        axes.grid(color="#dddddd", linewidth=0.5)
        _legend(axes, handles, list(shown))

    return _picture(draw, caption, 2.9 + 0.17 * (len(shown) // 2))


def heat_map(values: pd.DataFrame, label: str, caption: str) -> str:
    """Return a picture with a coloured cell for each layer and recorded round."""

    def draw(axes: Axes) -> None:
        image = axes.imshow(
            values, aspect="auto", cmap="cividis", interpolation="nearest"
        )
        axes.figure.colorbar(image, ax=axes, label=label)
        # Show as many names as the height allows.
        names = range(0, len(values), step(values.index, 25))
        axes.set_yticks(
            names, [short(values.index[at] or "(model)") for at in names], fontsize=7
        )
        columns = range(0, values.shape[1], step(values.columns, 6))
        axes.set_xticks(columns, [str(values.columns[at]) for at in columns])
        axes.set_xlabel("round")

    return _picture(draw, caption, max(2.6, 0.6 + 0.14 * min(len(values), 25)))


def step(many: Sequence[Any], most: int) -> int:
    """Return the step that leaves at most this number of elements."""
    return -(-len(many) // most)


def _legend(axes: Axes, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Write the legend below the picture, so that it covers nothing."""
    axes.figure.legend(
        handles,
        # matplotlib would leave out a name that begins with an underscore
        [short(name.lstrip("_")) for name in names],
        loc="outside lower center",
        ncols=2,
        fontsize=8,
        frameon=False,
    )


def _picture(draw: Callable[[Axes], None], caption: str, height: float) -> Markup:
    """Return a drawing as inline SVG, even for a screen of 400 pixels."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        # Text stays text, so that readers can search it, and "$" in a name stays "$".
        "svg.fonttype": "none",
        "text.parse_math": False,
        # Captions differ, so the ids of two pictures on a page differ as well.
        "svg.hashsalt": caption,
    }
    written = io.StringIO()
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(4.6, height), layout="constrained")
        draw(figure.subplots())
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})

    # Remove the XML's own head, and add a name for screen readers.
    text = html.escape(caption)
    _, _, svg = written.getvalue().partition("<svg")
    drawing = f'<svg role="img" aria-label="{text}"{svg}'
    return Markup(f"<figure>{drawing}<figcaption>{text}</figcaption></figure>")
