"""A table of the examples of each class on each client."""

from __future__ import annotations

from collections.abc import Sequence

from fedbn_flwr.lab.data.splits import Indices

_MOST_COLUMNS = 20


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

    classes = names or [str(label) for label in range(counts.shape[1])]
    # A class may be called "client" or "all", so number the columns until the end.
    table = pd.DataFrame(counts)
    table.loc["all"] = table.sum()
    # Summarise many classes in two columns, because a line with a column for each class
    # would be wider than a terminal.
    if len(classes) > _MOST_COLUMNS:
        largest = [classes[at] for at in table.idxmax(axis=1)]
        columns = {"classes": (table > 0).sum(axis=1), "largest": largest}
        shown = pd.DataFrame(columns).assign(all=table.sum(axis=1))
    else:
        shown = table.assign(all=table.sum(axis=1))
        shown.columns = [*classes, "all"]
    shown.insert(0, "client", shown.index, allow_duplicates=True)
    return str(shown.to_string(index=False))
