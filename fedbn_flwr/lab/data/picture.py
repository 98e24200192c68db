"""A picture and a table of the examples of each class on each client."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np

from fedbn_flwr.lab.data.splits import Indices

_MOST_COLUMNS = 20


def partition_picture(
    counts: Indices, title: str = "", names: Sequence[str] = ()
) -> bytes:
    """Return a PNG with a bar for each client, made of its examples of each class.

    Equal arguments give equal bytes.

    Args:
        counts: examples, int64 (clients, classes) from ``partition_counts``; or
            (clients, groups).
        title: text above the picture.
        names: names of the classes; if empty, their numbers.
    """
    # Import here, because matplotlib takes long to import. Do not use pyplot, because
    # pyplot may need a display.
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    classes = names or _numbers(counts)
    figure = Figure(figsize=(min(16.0, 4 + 0.2 * len(counts)), 4), layout="constrained")
    axis = figure.subplots()
    few = len(classes) <= _MOST_COLUMNS
    colours = colormaps["tab20" if few else "viridis"].resampled(len(classes))
    # Draw one class after another, each bar on top of the bars of the classes before.
    clients, bottom = np.arange(len(counts)), np.zeros(len(counts), np.int64)
    for label, of_class in enumerate(counts.T):
        axis.bar(
            clients, of_class, 0.9, bottom, color=colours(label), label=classes[label]
        )
        bottom = bottom + of_class
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set(xlabel="client", ylabel="training examples", title=title)
    if few:
        axis.legend(bbox_to_anchor=(1, 1), fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def partition_table(counts: Indices, names: Sequence[str] = ()) -> str:
    """Return a text table with a line for each client and a line of the totals.

    The columns are the classes and the total. With more than 20 classes, the columns
    are a client's number of classes, its largest class and the total.

    Args:
        counts: examples, int64 (clients, classes) from ``partition_counts``; or
            (clients, groups).
        names: names of the classes; if empty, their numbers.
    """
    import pandas as pd

    classes = names or _numbers(counts)
    table = pd.DataFrame(counts, columns=classes).rename_axis("client")
    table.loc["all"] = table.sum()
    # Summarise many classes in two columns, because a line with a column for each class
    # would be wider than a terminal.
    if len(classes) > _MOST_COLUMNS:
        columns = {"classes": (table > 0).sum(axis=1), "largest": table.idxmax(axis=1)}
        shown = pd.DataFrame(columns).assign(all=table.sum(axis=1))
    else:
        shown = table.assign(all=table.sum(axis=1))
    return str(shown.reset_index().to_string(index=False))


def _numbers(counts: Indices) -> list[str]:
    return [str(label) for label in range(counts.shape[1])]
