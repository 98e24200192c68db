"""The figures of a report as plotly's ``data`` and ``layout``, drawn in the browser by ``report.js``.

A colour is the name of a variable of ``report.css``, such as ``--c0``, so that a figure follows the page from light to
dark and to paper; ``--c0/33`` has an opacity of 0x33. Series differ in dashes and markers, too: colour is never alone.

Names come from users. Plotly reads a few tags in texts, so names are escaped here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

from fedbn_flwr.lab.report.shown import thinned
from fedbn_flwr.lab.studies.numbers import with_std

__all__ = [
    "BYTES",
    "EXCHANGES",
    "ROUNDS",
    "UNITS",
    "Dots",
    "Drawing",
    "Mark",
    "Series",
    "bars",
    "curves",
    "dots",
    "heatmap",
]

ROUNDS, EXCHANGES, BYTES = "rounds", "exchanges", "bytes"
UNITS = {ROUNDS: "server round", EXCHANGES: "exchanges", BYTES: "traffic, MiB of floats"}
"""What curves are drawn over, with the titles of the axes."""

_COLOURS, _DASHES = 7, ("solid", "dash", "dot", "dashdot")  # without a common divisor: 28 series differ
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
    hover: Sequence[str] = field(default_factory=tuple)


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
    whole, series = series, [_thinned(one) for one in series]
    short = any(one is not other for one, other in zip(series, whole, strict=True))
    note = {"note": f"In this figure at most {_MOST_POINTS:,} points of a curve are drawn."} if short else {}
    data: list[Drawing] = []
    places: dict[str, list[list[float | None]]] = {unit: [] for unit in UNITS}
    for one in series:
        if known := [at for at, bounds in enumerate(zip(one.low, one.high, strict=True)) if None not in bounds]:
            data.append(_band(one, known))
            for unit, found in places.items():
                found.append([one.over[unit][at] for at in (*known, *reversed(known))])
        data.append(_curve(one))
        for unit, found in places.items():
            found.append([*one.over[unit]])
    layout = {
        "hovermode": "x unified",
        "yaxis": {"title": {"text": _text(title)}, **({"type": "log", "dtick": "D2"} if log else {})},
        "showlegend": len(series) > 1,
    }
    units = {unit: {"x": found, "layout": _over(unit, found, marks)} for unit, found in places.items()}
    return {"data": data, "layout": layout, "units": units, "height": 340, **note}


def _thinned(one: Series) -> Series:
    """Return a series, a long one without the points that no screen can show."""
    if len(one.values) <= _MOST_POINTS:
        return one
    kept = thinned([at for at, value in enumerate(one.values) if value is not None], _MOST_POINTS - 1)

    def picked(numbers: Numbers) -> Numbers:
        return [numbers[at] for at in kept] if numbers else ()

    over = {unit: picked(places) for unit, places in one.over.items()}
    return replace(one, over=over, values=picked(one.values), low=picked(one.low), high=picked(one.high))


def _band(one: Series, known: Sequence[int]) -> Drawing:
    """Return the area between the bounds of a series, drawn there and back over the points that have them."""
    colour = _style(one.style)[0]
    return {
        "type": "scatter",
        "mode": "lines",
        "y": [*(one.high[at] for at in known), *(one.low[at] for at in reversed(known))],
        "fill": "toself",
        "fillcolor": f"{colour}/2a",
        "line": {"width": 0, "color": colour},
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": str(one.style),
    }


def _curve(one: Series) -> Drawing:
    colour, dash, marker = _style(one.style)
    few = sum(value is not None for value in one.values) <= _MANY_POINTS
    return {
        "type": "scatter",
        "mode": "lines+markers" if few else "lines",
        "name": _text(one.name),
        "y": list(one.values),
        "connectgaps": True,
        "line": {"color": colour, "dash": dash, "width": 1.8},
        "marker": {"color": colour, "symbol": marker, "size": 6},
        "legendgroup": str(one.style),
        "hovertemplate": "%{y:.4~g}",
    }


def _over(unit: str, places: Sequence[Numbers], marks: Sequence[Mark]) -> Drawing:
    """Return the horizontal axis of a unit; a short one counts in ones."""
    largest = max((place for over in places for place in over if place is not None), default=0)
    ones = {"dtick": 1} if unit != BYTES and largest <= 12 else {}
    return {"xaxis": {"title": {"text": UNITS[unit]}, **ones}, **_lines(marks, unit)}


def _lines(marks: Sequence[Mark], unit: str) -> Drawing:
    """Return vertical lines and their names."""
    line = {"color": "--muted", "width": 1, "dash": "dot"}
    shapes = [
        {"type": "line", "yref": "paper", "x0": m.over[unit], "x1": m.over[unit], "y0": 0, "y1": 1, "line": line}
        for m in marks
    ]
    notes = [
        {
            **{"text": _text(m.name), "x": m.over[unit], "y": 1, "yref": "paper", "yanchor": "bottom"},
            **{"showarrow": False, "font": {"size": 11, "color": "--muted"}},
        }
        for m in marks
    ]
    return {"shapes": shapes, "annotations": notes}


def bars(groups: Mapping[str, Mapping[str, float | None]], title: str, text: str = ".1f") -> Drawing:
    """Return horizontal bars: for each name a bar of each group.

    Args:
        groups: by the group's name, the values by name.
        title: of the axis of values.
        text: format of the numbers at the bars.
    """
    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    numbers = [value for values in groups.values() for value in values.values() if value is not None]
    room = (
        {"range": [0, 1.15 * max(numbers)]} if numbers and 0 <= min(numbers) < max(numbers) else {"rangemode": "tozero"}
    )
    patterns = ("", "/", ".", "x", "-")  # without a common divisor with the colours
    data = [
        {
            **{"type": "bar", "orientation": "h", "name": _text(group), "y": [_text(name) for name in names]},
            **{"x": [values.get(name) for name in names], "textposition": "outside", "cliponaxis": False},
            "texttemplate": f"%{{x:{text}}}",
            "hovertemplate": f"%{{y}}: %{{x:{text}}}<extra>{_text(group)}</extra>",
            "marker": {
                "color": _style(at)[0],
                "pattern": {
                    "shape": patterns[at % len(patterns)],
                    "fillmode": "overlay",
                    "fgcolor": "--paper",
                    "size": 7,
                },
            },
        }
        for at, (group, values) in enumerate(groups.items())
    ]
    layout = {
        **{"barmode": "group", "bargap": 0.3, "showlegend": len(groups) > 1, "hovermode": "closest"},
        "xaxis": {"title": {"text": _text(title)}, **room},
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
    small = len(across) * len(down) <= 150 and len(across) <= 16
    trace = {
        **{"type": "heatmap", "z": [list(row) for row in values], "xgap": 1, "ygap": 1},
        **{"x": [_text(name) for name in across], "y": [_text(name) for name in down], "zmin": 0},
        "zmax": max((value for row in values for value in row if value is not None), default=0) or 1,
        "colorscale": [[0, "--soft"], [1, "--light" if small else "--c0"]],  # numbers are read on a light colour
        "colorbar": {"title": {"text": _text(titles[2]), "side": "right"}, "thickness": 10, "outlinewidth": 0},
        "showscale": not small,
        "hovertemplate": f"{_text(titles[0])} %{{x}}, {_text(titles[1])} %{{y}}: %{{z:{text}}}<extra></extra>",
    }
    if small:
        trace |= {"texttemplate": f"%{{z:{text}}}", "textfont": {"color": "--ink"}}
    layout = {
        "xaxis": {
            **{"type": "category", "title": {"text": _text(titles[0])}, "showgrid": False},
            **({"nticks": 16, "tickangle": 0} if len(across) > 24 else {}),
        },
        "yaxis": {"type": "category", "title": {"text": _text(titles[1])}, "autorange": "reversed", "showgrid": False},
        "hovermode": "closest",
    }
    return {"data": [trace], "layout": layout, "height": 110 + min(max(22 * len(down), 120), 560)}


def dots(rows: Sequence[Dots], title: str, interval: str, form: str) -> Drawing:
    """Return a plot of all runs, the mean with an interval, and the paper's number, a row for each name.

    Args:
        rows: the rows, the first one on top.
        title: of the axis of values.
        interval: what the interval is, for the legend.
        form: the format of the values.
    """
    names = [_text(row.name) for row in rows]
    runs = [(name, value, seed) for name, row in zip(names, rows, strict=True) for value, seed in _runs(row)]
    means = [(name, row) for name, row in zip(names, rows, strict=True) if row.mean is not None]
    papers = [(name, row) for name, row in zip(names, rows, strict=True) if row.paper is not None]
    data = [
        {
            **{"type": "scatter", "mode": "markers", "name": "each run"},
            **{"x": [value for _, value, _ in runs], "y": [name for name, _, _ in runs]},
            **{"text": [seed for _, _, seed in runs], "hovertemplate": f"%{{text}}: %{{x:{form}}}<extra></extra>"},
            "marker": {"color": "--muted", "symbol": "circle-open", "size": 7},
        },
        {
            **{"type": "scatter", "mode": "markers", "name": f"mean, {interval}"},
            **{"x": [row.mean for _, row in means], "y": [name for name, _ in means]},
            "marker": {"color": "--c0", "symbol": "diamond", "size": 10},
            "error_x": {
                **{"type": "data", "symmetric": False, "color": "--c0", "thickness": 2, "width": 5},
                "array": [0 if row.high is None else row.high - (row.mean or 0) for _, row in means],
                "arrayminus": [0 if row.low is None else (row.mean or 0) - row.low for _, row in means],
            },
            "hovertemplate": f"mean %{{x:{form}}}<extra></extra>",
        },
        {
            **{"type": "scatter", "mode": "markers", "name": "the paper, with its ±"},
            **{"x": [row.paper for _, row in papers], "y": [name for name, _ in papers]},
            "marker": {"color": "--c1", "symbol": "x", "size": 9},
            "error_x": {
                **{"type": "data", "color": "--c1", "thickness": 1, "width": 3},
                "array": [row.paper_std for _, row in papers],
            },
            "hovertemplate": "the paper: %{text}<extra></extra>",
            "text": [with_std(row.paper, row.paper_std, form) for _, row in papers],
        },
    ]
    layout = {
        **{"hovermode": "closest", "showlegend": True},
        "xaxis": {"title": {"text": _text(title)}},
        "yaxis": {
            **{"type": "category", "autorange": "reversed"},
            **{"categoryorder": "array", "categoryarray": names},
        },
    }
    return {"data": [trace for trace in data if trace["x"]], "layout": layout, "height": 100 + 34 * len(rows)}


def _runs(row: Dots) -> Iterator[tuple[float, str]]:
    for at, value in enumerate(row.values):
        yield value, row.hover[at] if at < len(row.hover) else ""


def _text(name: str) -> str:
    return escape(str(name), quote=False)
