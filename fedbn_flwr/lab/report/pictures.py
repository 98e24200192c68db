"""The pictures of the report, as inline SVG with real text."""

from __future__ import annotations

import html
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fedbn_flwr.lab.results.numbers import label_of
from fedbn_flwr.training.tasks import in_percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# the colours of Okabe and Ito that differ from a white page and from a dark page
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b5578f", "#3d8fc2", "#8a6d00")
_STYLE: dict[Any, Any] = {
    # Text stays text, so that readers can search it, and "$" in a name stays "$".
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    # one grey for a white page and for a dark page
    "grid.color": "#88888855",
    "legend.frameon": False,
}
_NAME = 24
"""The most letters of a name in a picture."""

Curve = Mapping[int, float]
"""Values by round."""
Point = tuple[Any, Any, Any]
"""A value, and the ends of its interval; None without an interval."""


def short(name: str) -> str:
    """Return a name that fits into a picture, without the middle if it is long."""
    if len(name) > _NAME:
        name = f"{name[: _NAME // 2]}…{name[1 - _NAME // 2 :]}"
    # matplotlib leaves out names that begin with an underscore
    return name.lstrip("_")


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return the short name of each name; equal ones are numbered."""
    found, times = dict[str, str](), Counter[str]()
    for name in names:
        one = short(name)
        times[one] += 1
        found[name] = f"{one} ({times[one]})" if times[one] > 1 else one
    return found


def rows(found: Mapping[str, Point], metric: str, caption: str) -> Markup:
    """Return a picture with a point for each site or method, given by name."""

    def draw(axes: Axes) -> None:
        for place, (value, low, high) in enumerate(found.values()):
            if low is not None:
                axes.hlines(place, low, high, color=_COLOURS[0], alpha=0.6)
            axes.plot(value, place, "o", color=_COLOURS[0])
        axes.set_yticks(range(len(found)), [*found])
        axes.invert_yaxis()
        axes.grid(axis="x")
        _write_metric(axes.xaxis, metric)

    return _picture(draw, caption, 1.3 + 0.26 * len(found))


def curves(shown: Mapping[str, Curve], metric: str, caption: str) -> Markup:
    """Return a picture of curves over the rounds, given by name."""
    # Imported here, because a command without pictures does not need matplotlib.
    from matplotlib.ticker import MaxNLocator

    def draw(axes: Axes) -> None:
        # Curves also differ in dashes, because not everybody sees colours. A short
        # curve shows its points, because a single point has no line.
        for number, (name, curve) in enumerate(shown.items()):
            dots = "o" if len(curve) < 4 else ""
            (line,) = axes.plot([*curve], [*curve.values()], marker=dots, label=name)
            line.set(color=_COLOURS[number], linestyle=("-", "--", ":")[number % 3])
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        axes.set_xlabel("round")
        axes.grid()
        _write_metric(axes.yaxis, metric)
        if len(shown) > 1:
            axes.legend()

    return _picture(draw, caption, 2.9)


def _write_metric(axis: Axis, metric: str) -> None:
    """Write the metric at an axis, shares in per cent."""
    from matplotlib.ticker import PercentFormatter

    axis.set_label_text(label_of(metric))
    if in_percent(metric):
        axis.set_major_formatter(PercentFormatter(1, symbol=""))


def _picture(draw: Callable[[Axes], None], caption: str, height: float) -> Markup:
    """Return a drawing as inline SVG, even for a screen of 400 pixels."""
    import matplotlib
    from matplotlib.figure import Figure

    written = io.StringIO()
    # Captions differ, so the ids of two pictures on a page differ as well.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": caption}):
        figure = Figure(figsize=(3.8, height), layout="constrained")
        draw(figure.subplots())
        about = {"Date": None, "Creator": None}
        figure.savefig(written, format="svg", transparent=True, metadata=about)

    # Remove the XML's own head, and add a name for screen readers.
    text = html.escape(caption)
    _, _, svg = written.getvalue().partition("<svg")
    drawing = f'<svg role="img" aria-label="{text}"{svg}'
    return Markup(f"<figure>{drawing}<figcaption>{text}</figcaption></figure>")
