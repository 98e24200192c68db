"""The figures of a report as plotly's ``data`` and ``layout``, drawn in the browser by ``report.js``.

A colour is the name of a variable of ``report.css``, such as ``--c0``, so that a figure follows the page from light to
dark and to paper; ``--c0/33`` has an opacity of 0x33. Series differ in dashes and markers, too: colour is never alone.

Names come from users. Plotly reads a few tags in texts, so names are escaped here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import zip_longest
from typing import Any

from fedbn_flwr.lab.report.shown import in_percent, thinned, with_unit_of
from fedbn_flwr.lab.studies.rows import with_std

__all__ = [
    "BYTES",
    "EXCHANGES",
    "ROUNDS",
    "UNITS",
    "Dots",
    "Drawing",
    "Mark",
    "Series",
    "bars_of",
    "curves",
    "dots",
    "heatmap",
]

ROUNDS, EXCHANGES, BYTES = "rounds", "exchanges", "bytes"
UNITS = {ROUNDS: "server round", EXCHANGES: "exchanges", BYTES: "traffic, MiB of floats"}
"""What curves are drawn over, with the titles of the axes."""

_COLOURS, _DASHES = 7, ("solid", "dash", "dot", "dashdot")  # without a common divisor: 28 series differ
_PATTERNS = ("", "/", ".", "x", "-")  # of bars, without a common divisor with the colours
_MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down", "pentagon")
_MANY_POINTS = 30  # longer curves have no markers
_MOST_POINTS = 2000  # of a curve: a page of 64,000 rounds is large and slow otherwise

Drawing = dict[str, Any]
Numbers = Sequence[float | None]


@dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
        name: its name in the legend.
        over: by unit (``ROUNDS``, ...) the place of each point.
        values: the points; None leaves a gap.
        low, high: a band around the points, if any.
        style: number of its colour, dash and marker.
    """

    name: str
    over: Mapping[str, Numbers]
    values: Numbers
    style: int
    low: Numbers = ()
    high: Numbers = ()


@dataclass(frozen=True)
class Mark:
    """A vertical line with a name, at a place by unit."""

    name: str
    over: Mapping[str, float]


@dataclass(frozen=True)
class Dots:
    """A row of a plot of dots and intervals: all runs, their mean with an interval, the paper's number with its ±."""

    name: str
    values: Sequence[float]
    mean: float | None
    low: float | None = None
    high: float | None = None
    paper: float | None = None
    paper_std: float | None = None
    hover: Sequence[str] = ()


def _style(number: int) -> tuple[str, str, str]:
    """Return colour, dash and marker of a series."""
    return f"--c{number % _COLOURS}", _DASHES[number % len(_DASHES)], _MARKERS[number % len(_MARKERS)]


def curves(series: Sequence[Series], title: str, marks: Sequence[Mark] = (), *, log: bool = False) -> Drawing:
    """Return curves that a ``Switch`` draws over rounds, exchanges or bytes.

    Args:
        series: the curves.
        title: of the vertical axis.
        marks: vertical lines, such as the round after which BN is frozen.
        log: a logarithmic vertical axis.
    """
    data: list[Drawing] = []
    places: dict[str, list[list[float | None]]] = {unit: [] for unit in UNITS}
    for curve in map(_thinned, series):
        bounded = [at for at, bounds in enumerate(zip(curve.low, curve.high, strict=True)) if None not in bounds]
        if bounded:
            data.append(_band(curve, bounded))
        data.append(_curve(curve))
        for unit, of_traces in places.items():
            if bounded:
                of_traces.append([curve.over[unit][at] for at in (*bounded, *reversed(bounded))])
            of_traces.append([*curve.over[unit]])
    axis = {"title": {"text": _text(title)}}
    drawing = {
        "data": data,
        "layout": {
            "hovermode": "x unified",
            "yaxis": axis | {"type": "log", "dtick": "D2"} if log else axis,
            "showlegend": len(series) > 1,
        },
        "units": {unit: {"x": xs, "layout": _over(unit, xs, marks)} for unit, xs in places.items()},
        "height": 340,
    }
    if any(len(curve.values) > _MOST_POINTS for curve in series):
        drawing["note"] = f"In this figure at most {_MOST_POINTS:,} points of a curve are drawn."
    return drawing


def _thinned(curve: Series) -> Series:
    """Return a curve, a long one without the points that no screen can show."""
    if len(curve.values) <= _MOST_POINTS:
        return curve
    kept = thinned([at for at, value in enumerate(curve.values) if value is not None], _MOST_POINTS - 1)

    def picked(numbers: Numbers) -> Numbers:
        return [numbers[at] for at in kept] if numbers else ()

    over = {unit: picked(places) for unit, places in curve.over.items()}
    return replace(curve, over=over, values=picked(curve.values), low=picked(curve.low), high=picked(curve.high))


def _band(curve: Series, bounded: Sequence[int]) -> Drawing:
    """Return the area between the bounds of a curve, drawn there and back over the points that have them."""
    colour = _style(curve.style)[0]
    return {
        "type": "scatter",
        "mode": "lines",
        "y": [curve.high[at] for at in bounded] + [curve.low[at] for at in reversed(bounded)],
        "fill": "toself",
        "fillcolor": f"{colour}/2a",
        "line": {"width": 0, "color": colour},
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": str(curve.style),
    }


def _curve(curve: Series) -> Drawing:
    colour, dash, marker = _style(curve.style)
    few = sum(value is not None for value in curve.values) <= _MANY_POINTS
    return {
        "type": "scatter",
        "mode": "lines+markers" if few else "lines",
        "name": _text(curve.name),
        "y": list(curve.values),
        "connectgaps": True,
        "line": {"color": colour, "dash": dash, "width": 1.8},
        "marker": {"color": colour, "symbol": marker, "size": 6},
        "legendgroup": str(curve.style),
        "hovertemplate": "%{y:.4~g}",
    }


def _over(unit: str, places: Sequence[Numbers], marks: Sequence[Mark]) -> Drawing:
    """Return the horizontal axis of a unit, a short one in steps of one, and the marks with their names."""
    axis: Drawing = {"title": {"text": UNITS[unit]}}
    largest = max((place for of_trace in places for place in of_trace if place is not None), default=0)
    if unit != BYTES and largest <= 12:
        axis["dtick"] = 1
    line = {"color": "--muted", "width": 1, "dash": "dot"}
    shapes, names = [], []
    for mark in marks:
        x = mark.over[unit]
        shapes.append({"type": "line", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": line})
        names.append(
            {
                "text": _text(mark.name),
                "x": x,
                "y": 1,
                "yref": "paper",
                "yanchor": "bottom",
                "showarrow": False,
                "font": {"size": 11, "color": "--muted"},
            }
        )
    return {"xaxis": axis, "shapes": shapes, "annotations": names}


def bars_of(groups: Mapping[str, Mapping[str, float | None]], quantity: str) -> Drawing:
    """Return horizontal bars: for each name a bar of each group.

    Args:
        groups: by the group's name, the values by name.
        quantity: what the values are, such as "accuracy"; it gives the axis and the format of the numbers.
    """
    text = ".1f" if in_percent(quantity) else ".3f"
    title = {"text": _text(with_unit_of(quantity))}
    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    numbers = [value for values in groups.values() for value in values.values() if value is not None]
    axis: Drawing = {"title": title, "rangemode": "tozero"}
    if numbers and 0 <= min(numbers) < max(numbers):
        axis = {"title": title, "range": [0, 1.15 * max(numbers)]}  # room for the numbers at the bars
    data = []
    for at, (group, values) in enumerate(groups.items()):
        pattern = {
            "shape": _PATTERNS[at % len(_PATTERNS)],
            "fillmode": "overlay",
            "fgcolor": "--paper",
            "size": 7,
        }
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": _text(group),
                "x": [values.get(name) for name in names],
                "y": [_text(name) for name in names],
                "texttemplate": f"%{{x:{text}}}",
                "textposition": "outside",
                "cliponaxis": False,
                "hovertemplate": f"%{{y}}: %{{x:{text}}}<extra>{_text(group)}</extra>",
                "marker": {"color": _style(at)[0], "pattern": pattern},
            }
        )
    layout = {
        "barmode": "group",
        "bargap": 0.3,
        "showlegend": len(groups) > 1,
        "hovermode": "closest",
        "xaxis": axis,
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
    }
    return {"data": data, "layout": layout, "height": 90 + max(22 * len(names) * max(len(groups), 1), 40)}


def heatmap(
    values: Sequence[Numbers],
    across: Sequence[str],
    down: Sequence[str],
    *,
    titles: tuple[str, str, str],
    text: str = ",d",
) -> Drawing:
    """Return a table as colours, darker is more; small ones have their numbers in the cells.

    Args:
        values: a row for each name in ``down``.
        across: the names of the columns.
        down: the names of the rows, the first one on top.
        titles: of the horizontal axis, the vertical axis and the values.
        text: format of the numbers.
    """
    x_title, y_title, z_title = map(_text, titles)
    small = len(across) * len(down) <= 150 and len(across) <= 16
    trace = {
        "type": "heatmap",
        "z": [list(row) for row in values],
        "x": [_text(name) for name in across],
        "y": [_text(name) for name in down],
        "zmin": 0,
        "zmax": max((value for row in values for value in row if value is not None), default=0) or 1,
        "xgap": 1,
        "ygap": 1,
        "colorscale": [[0, "--soft"], [1, "--light" if small else "--c0"]],  # numbers are read on a light colour
        "colorbar": {"title": {"text": z_title, "side": "right"}, "thickness": 10, "outlinewidth": 0},
        "showscale": not small,
        "hovertemplate": f"{x_title} %{{x}}, {y_title} %{{y}}: %{{z:{text}}}<extra></extra>",
    }
    if small:
        trace |= {"texttemplate": f"%{{z:{text}}}", "textfont": {"color": "--ink"}}
    x_axis = {"type": "category", "title": {"text": x_title}, "showgrid": False}
    if len(across) > 24:
        x_axis |= {"nticks": 16, "tickangle": 0}
    y_axis = {"type": "category", "title": {"text": y_title}, "autorange": "reversed", "showgrid": False}
    layout = {"xaxis": x_axis, "yaxis": y_axis, "hovermode": "closest"}
    return {"data": [trace], "layout": layout, "height": 110 + min(max(22 * len(down), 120), 560)}


def dots(rows: Sequence[Dots], title: str, interval: str, form: str) -> Drawing:
    """Return a plot of all runs, the mean with an interval, and the paper's number, a row for each name.

    Args:
        rows: the rows, the first one on top.
        title: of the axis of values.
        interval: what the interval is, for the legend.
        form: the format of the values.
    """
    runs = [(row, value, seed) for row in rows for value, seed in zip_longest(row.values, row.hover, fillvalue="")]
    means = [row for row in rows if row.mean is not None]
    papers = [row for row in rows if row.paper is not None]
    data: list[Drawing] = [
        {
            "name": "each run",
            "x": [value for _, value, _ in runs],
            "y": [_text(row.name) for row, _, _ in runs],
            "text": [seed for _, _, seed in runs],
            "hovertemplate": f"%{{text}}: %{{x:{form}}}<extra></extra>",
            "marker": {"color": "--muted", "symbol": "circle-open", "size": 7},
        },
        {
            "name": f"mean, {interval}",
            "x": [row.mean for row in means],
            "y": [_text(row.name) for row in means],
            "hovertemplate": f"mean %{{x:{form}}}<extra></extra>",
            "marker": {"color": "--c0", "symbol": "diamond", "size": 10},
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": [0 if row.high is None else row.high - (row.mean or 0) for row in means],
                "arrayminus": [0 if row.low is None else (row.mean or 0) - row.low for row in means],
                "color": "--c0",
                "thickness": 2,
                "width": 5,
            },
        },
        {
            "name": "the paper, with its ±",
            "x": [row.paper for row in papers],
            "y": [_text(row.name) for row in papers],
            "text": [with_std(row.paper, row.paper_std, form) for row in papers],
            "hovertemplate": "the paper: %{text}<extra></extra>",
            "marker": {"color": "--c1", "symbol": "x", "size": 9},
            "error_x": {
                "type": "data",
                "array": [row.paper_std for row in papers],
                "color": "--c1",
                "thickness": 1,
                "width": 3,
            },
        },
    ]
    layout = {
        "hovermode": "closest",
        "showlegend": True,
        "xaxis": {"title": {"text": _text(title)}},
        "yaxis": {
            "type": "category",
            "autorange": "reversed",
            "categoryorder": "array",
            "categoryarray": [_text(row.name) for row in rows],
        },
    }
    traces = [{"type": "scatter", "mode": "markers", **trace} for trace in data if trace["x"]]
    return {"data": traces, "layout": layout, "height": 100 + 34 * len(rows)}


def _text(name: str) -> str:
    return escape(str(name), quote=False)
