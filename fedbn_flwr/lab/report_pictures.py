"""The pictures of the report, as inline SVG with real text."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pandas as pd
from markupsafe import Markup

from fedbn_flwr.lab.answer import label_of
from fedbn_flwr.training.tasks import in_percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# the colours of Okabe and Ito that differ from a white page and from a dark page
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b5578f", "#3d8fc2", "#8a6d00")
_DASHES = ("-", "--", ":", "-.")
_MARKERS = "o|xsv^D"
_NAME = 24
"""The most letters of a name in a picture."""
_POINTS = 300
"""The most points of a curve: more of them would only enlarge the page."""

Curve = Mapping[int, float]
"""Values by round."""
NONE: Mapping[str, Any] = MappingProxyType({})


def short(name: str) -> str:
    """Return a name that fits into a picture, without the middle if it is long."""
    if len(name) > _NAME:
        name = f"{name[: _NAME // 2]}…{name[1 - _NAME // 2 :]}"
    # matplotlib leaves out names that begin with an underscore
    return name.lstrip("_")


def rows(
    found: pd.DataFrame,
    metric: str,
    caption: str,
    numbers: Mapping[str, int] = NONE,
    file: Path | None = None,
) -> str:
    """Return a picture with a row of points for each site or method.

    Args:
        found: a row for each site by its name, with the columns ``low`` and ``high`` of
            the interval, and a column for each kind of point; NaN is no point.
        metric: the metric of the values.
        caption: the text below.
        numbers: the numbers of the colours of the rows, by name. By default, a kind of
            point has one colour.
        file: the picture is also in these files, see ``_picture``.
    """

    def draw(axes: Axes) -> None:
        places = list(range(len(found), 0, -1))
        colours = [
            _COLOURS[numbers.get(name, 0) % len(_COLOURS)] for name in found.index
        ]
        axes.hlines(places, found["low"], found["high"], color=colours, alpha=0.6)
        kinds = found.columns.drop(["low", "high"])
        for place, kind in enumerate(kinds):
            colour = _COLOURS[place % len(_COLOURS)]
            fill = colour if kind == kinds[0] else "none"
            style: dict[str, Any] = {
                "color": colour,
                "marker": _MARKERS[place % len(_MARKERS)],
                "markerfacecolor": fill,
            }
            axes.plot(found[kind], places, linestyle="", label=short(kind), **style)
        if numbers:
            axes.scatter(found[kinds[0]], places, color=colours, zorder=3)
        axes.set_yticks(places, found.index)
        axes.set_ylim(0.4, len(found) + 0.6)
        axes.grid(axis="x", linewidth=0.5)
        axes.tick_params(axis="y", length=0)
        _write_metric(axes.xaxis, metric)

    return _picture(draw, caption, 1.3 + 0.26 * len(found), file)


def curves(
    shown: Mapping[str, Curve],
    metric: str,
    caption: str,
    *,
    thin: Mapping[str, Curve] = NONE,
    marks: Sequence[int] = (),
    bands: Mapping[str, tuple[Curve, Curve]] = NONE,
    log: bool = False,
    numbers: Mapping[str, int] = NONE,
    file: Path | None = None,
) -> str:
    """Return a picture of curves over the rounds.

    Args:
        shown: curves by name.
        metric: the metric of the values.
        caption: the text below.
        thin: further curves by name, such as the curve of each site.
        marks: rounds that get a vertical line.
        bands: the lowest and the highest values of some curves, by name.
        log: whether the values are lengths on a logarithmic axis.
        numbers: the numbers of the colours and dashes, by the short names of the
            curves. By default, these are the places of the curves.
        file: the picture is also in these files, see ``_picture``.
    """
    # Imported here, because a command without pictures does not need matplotlib.
    from matplotlib.ticker import LogFormatter, MaxNLocator

    def draw(axes: Axes) -> None:
        few = len(thin) <= len(_COLOURS)
        for curve in thin.values():
            faint = 0.5 if few else 0.2
            axes.plot(*_points(curve), color=_COLOURS[0], alpha=faint, linewidth=0.8)
        # Curves also differ in dashes, because not everybody sees colours. A short
        # curve shows its points, because a single point has no line.
        for place, name in enumerate(shown):
            number = numbers.get(short(name), place)
            colour, dashes = _COLOURS[number % len(_COLOURS)], _DASHES[number % 4]
            marker = "o" if len(shown[name]) < 4 else ""
            style: dict[str, Any] = {
                "color": colour,
                "linestyle": dashes,
                "marker": marker,
            }
            axes.plot(*_points(shown[name]), linewidth=1.8, label=short(name), **style)
            if name in bands:
                (at, low), (_, high) = map(_points, bands[name])
                axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
        if thin and few:
            _name_ends(axes, {**thin, **shown})
        for mark in marks:
            axes.axvline(mark, color="#888888", linewidth=0.8, linestyle=":")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        axes.set_xlabel("round")
        axes.grid(linewidth=0.5)
        if log:
            axes.set_yscale("log")
            axes.set_ylabel(metric)
            axes.yaxis.set_major_formatter("{x:g}")
            # Labels between the powers of ten, without mathtext, if there is room.
            axes.yaxis.set_minor_formatter(LogFormatter())
        else:
            _write_metric(axes.yaxis, metric)

    return _picture(draw, caption, 2.9 + 0.17 * (len(shown) // 2), file)


def _write_metric(axis: Axis, metric: str) -> None:
    """Write the metric at an axis, shares in per cent."""
    from matplotlib.ticker import PercentFormatter

    axis.set_label_text(label_of(metric))
    if in_percent(metric):
        axis.set_major_formatter(PercentFormatter(1, symbol=""))


def _name_ends(axes: Axes, named: Mapping[str, Curve]) -> None:
    """Write the names of curves beside their ends, each with a line to its end."""
    ends = [(*list(curve.items())[-1], name) for name, curve in named.items() if curve]
    ends.sort(key=lambda end: end[1])
    # No name covers another, and the highest name is at most at the top.
    bottom, top = axes.get_ylim()
    heights = [bottom]
    for _, value, _ in ends:
        heights.append(max(heights[-1] + (top - bottom) / 15, value))
    above = max(heights[-1] - top, 0)
    for (at, value, name), height in zip(ends, heights[1:], strict=True):
        axes.annotate(
            short(name),
            (at, value),
            (1.07, height - above),
            textcoords=("axes fraction", "data"),
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "relpos": (0, 0.5),
                "color": "#888888",
                "linewidth": 0.6,
            },
        )


def _points(curve: Curve) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the rounds and values of at most ``_POINTS`` points, with the last one."""
    step = -(-len(curve) // _POINTS)
    rounds, values = zip(*list(curve.items())[::-step], strict=True)
    return rounds, values


def _picture(
    draw: Callable[[Axes], None], caption: str, height: float, file: Path | None = None
) -> Markup:
    """Return a drawing as inline SVG, even for a screen of 400 pixels.

    If a file is given, the drawing is also written with the endings svg, pdf and png.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

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
        "legend.frameon": False,
    }
    written = io.StringIO()
    with matplotlib.rc_context(settings):
        # Leave room for half of the last label of the axis.
        layout = ConstrainedLayoutEngine(rect=(0, 0, 0.96, 1))
        figure = Figure(figsize=(3.8, height), layout=layout)
        axes = figure.subplots()
        draw(axes)
        # The legend is below the picture, so that it covers nothing.
        if len(axes.get_legend_handles_labels()[1]) > 1:
            figure.legend(loc="outside lower center", ncols=2)
        about = {"Date": None, "Creator": None}
        figure.savefig(written, format="svg", transparent=True, metadata=about)
        for ending in ("svg", "pdf", "png") if file else ():
            figure.savefig(f"{file}.{ending}", format=ending, dpi=300)

    # Remove the XML's own head, and add a name for screen readers.
    text = html.escape(caption)
    _, _, svg = written.getvalue().partition("<svg")
    drawing = f'<svg role="img" aria-label="{text}"{svg}'
    return Markup(f"<figure>{drawing}<figcaption>{text}</figcaption></figure>")
