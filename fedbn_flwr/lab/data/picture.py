"""A picture and a table of a partition: the examples of each class on each client."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.splits import Indices

__all__ = ["partition_picture", "partition_table"]

_MOST_LABELS = 400
_MOST_COLUMNS = 20


def partition_picture(counts: Indices, title: str = "", names: Sequence[str] = ()) -> bytes:
    """Return a PNG: a column per client, a row per class (class 0 at the bottom), darker for more examples.

    With at most 400 cells, each cell shows its count; empty cells stay white. Equal arguments give equal bytes on one
    machine.

    Args:
        counts: examples, int64 (clients, classes) from ``partition_counts``; or (clients, groups).
        title: text above the picture.
        names: names of the rows; if empty, their numbers.

    Raises:
        DataError: counts are not a table, or the names do not fit it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    _check(counts, names)
    clients, classes = counts.shape
    size = (min(16.0, 2.5 + 0.45 * clients), min(16.0, 1.8 + 0.35 * classes))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    image = axis.imshow(
        np.ma.masked_equal(counts.T, 0),
        cmap="Blues",
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        vmin=0,
        vmax=max(1, int(counts.max(initial=0))),
    )
    figure.colorbar(image, ax=axis, label="training examples")
    if counts.size <= _MOST_LABELS:
        for client, label in np.argwhere(counts > 0).tolist():
            value = int(counts[client, label])
            colour = "white" if 2 * value > counts.max() else "black"
            axis.text(client, label, str(value), ha="center", va="center", fontsize=6, color=colour)
    axis.set(xlabel="client", ylabel="" if names else "class", title=title)
    axis.set_xticks(range(0, clients, -(-clients // 25)))
    axis.set_yticks(range(0, classes, -(-classes // 25)))
    if names:
        axis.set_yticks(range(classes), list(names))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def partition_table(counts: Indices, names: Sequence[str] = ()) -> str:
    """Return a text table: a line per client with its examples of each class and their sum, then a line of totals.

    With more than 20 classes, the columns are instead a client's number of classes and its largest class.

    Args:
        counts: examples, int64 (clients, classes) from ``partition_counts``; or (clients, groups).
        names: names of the classes; if empty, their numbers.

    Raises:
        DataError: counts are not a table, or the names do not fit it.
    """
    _check(counts, names)
    columns = list(names) or [str(label) for label in range(counts.shape[1])]
    lines = [["client", *columns, "all"] if len(columns) <= _MOST_COLUMNS else ["client", "classes", "largest", "all"]]
    whole = np.vstack([counts, counts.sum(0, keepdims=True)])
    for client, row in enumerate(whole.tolist()):
        cells = [str(count) for count in row]
        if len(columns) > _MOST_COLUMNS:
            cells = [str(sum(map(bool, row))), f"{columns[row.index(max(row))]}: {max(row)}"]
        lines.append([str(client) if client < len(counts) else "all", *cells, str(sum(row))])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [map(str.rjust, line, widths) for line in lines]
    return "\n".join("  ".join(line) for line in padded)


def _check(counts: Indices, names: Sequence[str]) -> None:
    if counts.ndim != 2 or counts.size == 0 or (names and len(names) != counts.shape[1]):
        raise DataError(f"counts of shape {counts.shape} with {len(names)} names: (clients, classes), a name each.")
