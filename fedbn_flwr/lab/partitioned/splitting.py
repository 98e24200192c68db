"""The tables of a split: examples by client, and by class or group."""

from __future__ import annotations

from dataclasses import dataclass

from fedbn_flwr.lab.config import Config, data_of
from fedbn_flwr.lab.data import partition_counts
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data


@dataclass(frozen=True)
class Counts:
    """A table with the numbers of examples by client, and by class or group.

    Attributes:
        what: the kind of the columns: class, group or example.
        counts: numbers of examples, int64 (clients, columns).
        names: names of the columns.
        of: the kind of the counted examples: training or validation.
    """

    what: str
    counts: Indices
    names: tuple[str, ...]
    of: str = "training"


def count_split(config: Config) -> tuple[Counts, ...]:
    """Return the tables of a config's split by class, and by group if any.

    If there is ``validation-share``, tables of the validation examples come after the
    tables of the training examples.

    Raises:
        ConfigError: the split does not fit the data, or the number of clients.
        DataError: the data is missing, or it cannot be split in this way.
    """
    split = partitioned_data(config, count_clients(config))
    samples = split.dataset.train
    columns = []
    if samples.by_class:
        columns.append(("class", samples.labels, split.dataset.label_names))
    # If groups are clients, a table by group repeats the sizes of the clients.
    natural = data_of(config).split_name == "natural"
    if samples.groups is not None and not natural:
        columns.append(("group", samples.groups, split.dataset.group_names))
    # Without classes and groups, all labels are 0, so a single column with the number
    # of examples is enough.
    if not columns:
        columns.append(("example", samples.labels, ("examples",)))
    parts = {"training": split.train}
    if split.validation:
        parts["validation"] = split.validation
    tables = []
    for of, of_clients in parts.items():
        for what, values, names in columns:
            numbers = values.cpu().numpy()
            counts = partition_counts(of_clients, numbers, len(names))
            tables.append(Counts(what, counts, names, of))
    return tuple(tables)
