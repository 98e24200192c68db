"""The pictures of the report, as inline SVG with real text."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fedbn_flwr.lab.answer import label_of
from fedbn_flwr.training.tasks import in_percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# the colours of Okabe and Ito that differ from a white page and from a dark page
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b5578f", "#3d8fc2", "#8a6d00")
_DASHES = ("-", "--", ":", "-.")
_NAME = 24
"""The most letters of a name in a picture."""
_POINTS = 300
"""The most points of a curve: more of them would only enlarge the page."""

Curve = Mapping[int, float]
"""Values by round."""
Point = tuple[Any, Any, Any]
"""A value, and the ends of its interval; None without an interval."""
NONE: Mapping[str, Any] = MappingProxyType({})


def short(name: str) -> str:
    """Return a name that fits into a picture, without the middle if it is long."""
    if len(name) > _NAME:
        name = f"{name[: _NAME // 2]}…{name[1 - _NAME // 2 :]}"
    # matplotlib leaves out names that begin with an underscore
    return name.lstrip("_")


def rows(
    found: Mapping[str, Point],
    metric: str,
    caption: str,
    numbers: Mapping[str, int] = NONE,
) -> str:
    """Return a picture with a point for each site or method.

    Args:
        found: the points by name.
        metric: the metric of the values.
        caption: the text below.
        numbers: the numbers of the colours, by name. By default, all points have one
            colour.
    """

    def draw(axes: Axes) -> None:
        places = range(len(found), 0, -1)
        for place, (name, (value, low, high)) in zip(
            places, found.items(), strict=True
        ):
            colour = _COLOURS[numbers.get(name, 0) % len(_COLOURS)]
            if low is not None:
                axes.hlines(place, low, high, color=colour, alpha=0.6)
            axes.plot(value, place, "o", color=colour)
        axes.set_yticks(places, [*found])
        axes.set_ylim(0.4, len(found) + 0.6)
        axes.grid(axis="x", linewidth=0.5)
        axes.tick_params(axis="y", length=0)
        _write_metric(axes.xaxis, metric)

    return _picture(draw, caption, 1.3 + 0.26 * len(found))


def curves(
    shown: Mapping[str, Curve],
    metric: str,
    caption: str,
    *,
    numbers: Mapping[str, int] = NONE,
) -> str:
    """Return a picture of curves over the rounds.

    Args:
        shown: curves by name.
        metric: the metric of the values.
        caption: the text below.
        numbers: the numbers of the colours and dashes, by the short names of the
            curves. By default, these are the places of the curves.
    """
    # Imported here, because a command without pictures does not need matplotlib.
    from matplotlib.ticker import MaxNLocator

    def draw(axes: Axes) -> None:
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
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        axes.set_xlabel("round")
        axes.grid(linewidth=0.5)
        _write_metric(axes.yaxis, metric)

    return _picture(draw, caption, 2.9 + 0.17 * (len(shown) // 2))


def _write_metric(axis: Axis, metric: str) -> None:
    """Write the metric at an axis, shares in per cent."""
    from matplotlib.ticker import PercentFormatter

    axis.set_label_text(label_of(metric))
    if in_percent(metric):
        axis.set_major_formatter(PercentFormatter(1, symbol=""))


def _points(curve: Curve) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the rounds and values of at most ``_POINTS`` points, with the last one."""
    step = -(-len(curve) // _POINTS)
    rounds, values = zip(*list(curve.items())[::-step], strict=True)
    return rounds, values


def _picture(draw: Callable[[Axes], None], caption: str, height: float) -> Markup:
    """Return a drawing as inline SVG, even for a screen of 400 pixels."""
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

    # Remove the XML's own head, and add a name for screen readers.
    text = html.escape(caption)
    _, _, svg = written.getvalue().partition("<svg")
    drawing = f'<svg role="img" aria-label="{text}"{svg}'
    return Markup(f"<figure>{drawing}<figcaption>{text}</figcaption></figure>")
