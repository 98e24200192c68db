"""The split of a config: numbers of training examples by client and class, and by client and group.

A run writes them to ``split.json``: ``clients`` has the clients' names, ``tables`` each table with ``what``, ``of``,
``names`` and ``counts``, as in ``Counts``. With more than ``MAX_CLIENTS`` clients there is no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.data import partition_counts, partition_picture
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.partitioned.counts import client_names
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData, count_clients, partitioned_data

__all__ = ["MAX_CLIENTS", "Counts", "count_split", "draw_split", "split_counts", "split_to_json"]

MAX_CLIENTS = 1000
"""With more clients the tables are larger than the rest of a run's folder, and no picture shows them."""


@dataclass(frozen=True)
class Counts:
    """Training or validation examples by ``what``, int64 (clients, columns), and the columns' names."""

    what: str
    counts: Indices
    names: tuple[str, ...]
    of: str = "training"


def count_split(config: Config) -> tuple[Counts, ...]:
    """Return the tables of a config's split: by class if images have one class, and by group if there are groups.

    With ``validation-share``, the tables of the validation examples follow those of the training examples.

    Raises:
        ConfigError: the split does not fit the data, or the number of clients.
        DataError: the data is missing, or it cannot be split in this way.
    """
    return split_counts(partitioned_data(config, count_clients(config)))


def split_counts(split: PartitionedData) -> tuple[Counts, ...]:
    """Return the tables of a split, as ``count_split``."""
    samples = split.dataset.train
    columns = []
    if samples.by_class:
        columns.append(("class", samples.labels, split.dataset.label_names))
    if samples.groups is not None:
        columns.append(("group", samples.groups, split.dataset.group_names))
    if not columns:
        columns.append(("example", samples.labels, ("examples",)))
    tables = []
    for of, parts in (("training", split.train), ("validation", split.validation)):
        for what, numbers, names in columns if parts else ():
            tables.append(Counts(what, partition_counts(parts, numbers.cpu().numpy(), len(names)), names, of))
    return tuple(tables)


def split_to_json(split: PartitionedData) -> dict[str, Any] | None:
    """Return the content of ``split.json``; None with more than ``MAX_CLIENTS`` clients."""
    if len(split.train) > MAX_CLIENTS:
        return None
    tables = [
        {"what": table.what, "of": table.of, "names": list(table.names), "counts": table.counts.tolist()}
        for table in split_counts(split)
    ]
    return {"clients": client_names(split), "tables": tables}


def draw_split(config: Config, table: Counts, path: Path) -> None:
    """Write a table as a picture, see ``partition_picture``.

    Raises:
        ConfigError: the file exists, or it cannot be written.
    """
    if path.exists():
        raise ConfigError(f"out={str(path)!r} is there; results are never overwritten. Choose another file.")
    title = f"{config.dataset}, partition={config.partition}, {len(table.counts)} clients, seed {config.seed}"
    picture = partition_picture(table.counts, title, () if table.what == "class" else table.names)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, picture)
    except OSError as error:
        raise ConfigError(f"out={str(path)!r} cannot be written: {error}") from error
