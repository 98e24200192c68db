"""The pictures of the report, as inline SVG with real text."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# the colours of Okabe and Ito that differ from a white page and from a dark page
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b5578f", "#3d8fc2", "#8a6d00")
_DASHES = ("-", "--", ":", "-.")
_MARKERS = "o|xsv^D"
_NAME = 24
"""The most letters of a name in a picture."""
_POINTS = 300
"""The most points of a curve: more of them would only enlarge the page."""

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
        more: a text after the name.
    """

    name: str
    values: Sequence[float | None]
    low: float | None = None
    high: float | None = None
    more: str = ""


def short(name: str) -> str:
    """Return a name that fits into a picture, without the middle if it is long."""
    if len(name) <= _NAME:
        return name
    return f"{name[: _NAME // 2]}…{name[1 - _NAME // 2 :]}"


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
                axes.hlines(place, row.low, row.high, color=_COLOURS[0], alpha=0.6)
        for at, kind in enumerate(kinds):
            # matplotlib leaves out NaN, a row without this point
            values = [row.values[at] for row in found]
            axes.plot(
                [math.nan if value is None else value for value in values],
                list(places),
                color=_COLOURS[at % len(_COLOURS)],
                marker=_MARKERS[at % len(_MARKERS)],
                markerfacecolor=None if at == 0 else "none",
                linestyle="",
                label=kind.lstrip("_"),
            )
        names = [f"{short(row.name)} {row.more}".rstrip() for row in found]
        axes.set_yticks(list(places), names)
        axes.set_ylim(0.4, len(found) + 0.6)
        axes.set_xlabel(label)
        axes.grid(axis="x", linewidth=0.5)
        axes.tick_params(axis="y", length=0)

    return _picture(draw, caption, 1.3 + 0.26 * len(found))


def curves(
    shown: Mapping[str, Curve],
    label: str,
    caption: str,
    *,
    thin: Mapping[str, Curve] = MappingProxyType({}),
    marks: Sequence[int] = (),
    bands: Mapping[str, _Band] | None = None,
    log: bool = False,
) -> str:
    """Return a picture of curves over the rounds.

    Args:
        shown: rounds and values by name.
        label: label of the axis of values.
        caption: the text below.
        thin: further curves by name, such as the curve of each site.
        marks: rounds that get a vertical line.
        bands: the lowest and highest values of some curves, by name.
        log: whether the axis of values is logarithmic.
    """
    # Imported here, because a command without pictures does not need matplotlib.
    from matplotlib.ticker import LogFormatter, MaxNLocator

    def draw(axes: Axes) -> None:
        few = len(thin) <= len(_COLOURS)
        faint = 0.5 if few else 0.2
        for curve in thin.values():
            axes.plot(*_thinned(*curve), color=_COLOURS[0], alpha=faint, linewidth=0.8)
        # Curves also differ in dashes, because not everybody sees colours. A short
        # curve shows its points, because a single point has no line.
        for at, (name, curve) in enumerate(shown.items()):
            colour = _COLOURS[at % len(_COLOURS)]
            axes.plot(
                *_thinned(*curve),
                color=colour,
                linestyle=_DASHES[at % len(_DASHES)],
                linewidth=1.8,
                marker="o" if len(curve[0]) < 4 else "",
                label=name.lstrip("_"),
            )
            if bands and name in bands:
                low, high = (_thinned(curve[0], end) for end in bands[name])
                axes.fill_between(*low, high[1], color=colour, alpha=0.15, linewidth=0)
        if few:
            _name_ends(axes, thin)
        for mark in marks:
            axes.axvline(mark, color="#888888", linewidth=0.8, linestyle=":")
        if log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            # Labels between the powers of ten, without mathtext, if there is room.
            axes.yaxis.set_minor_formatter(LogFormatter())
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_xlabel("round")
        axes.set_ylabel(label)
        axes.grid(linewidth=0.5)

    return _picture(draw, caption, 2.9 + 0.17 * (len(shown) // 2))


def _name_ends(axes: Axes, named: Mapping[str, Curve]) -> None:
    """Write the names of curves at their ends, one above the other."""
    bottom, top = axes.get_ylim()
    place = bottom
    for name, (rounds, values) in sorted(named.items(), key=lambda one: one[1][1][-1]):
        place = max(place + (top - bottom) / 18, values[-1])
        axes.annotate(
            short(name),
            (rounds[-1], place),
            (4, 0),
            textcoords="offset points",
            va="center",
            annotation_clip=False,
        )


def _thinned(rounds: Sequence[int], values: Sequence[float]) -> Curve:
    """Return a curve with a limited number of points, including the last point."""
    step = -(-len(rounds) // _POINTS) or 1
    return rounds[::-step], values[::-step]


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
        "font.size": 8.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        # one grey for a white page and for a dark page
        "grid.color": "#88888855",
    }
    written = io.StringIO()
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(4.6, height), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        # The legend is below the picture, so that it covers nothing. matplotlib leaves
        # out names that begin with an underscore.
        handles, names = axes.get_legend_handles_labels()
        if len(names) > 1:
            figure.legend(
                handles,
                [short(name) for name in names],
                loc="outside lower center",
                ncols=2,
                frameon=False,
            )
        about = {"Date": None, "Creator": None}
        figure.savefig(written, format="svg", transparent=True, metadata=about)

    # Remove the XML's own head, and add a name for screen readers.
    text = html.escape(caption)
    _, _, svg = written.getvalue().partition("<svg")
    drawing = f'<svg role="img" aria-label="{text}"{svg}'
    return Markup(f"<figure>{drawing}<figcaption>{text}</figcaption></figure>")
