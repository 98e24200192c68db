"""The examples on which the model of a run is evaluated: which of the new data, by group, and where they are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.data import OwnRows, Subset, is_own, own_rows
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.files import read_json
from fedbn_flwr.lab.finished_runs.saved_model import SavedModel
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData, count_clients, partitioned_data
from fedbn_flwr.lab.partitioned.report import HELD_OUT_CLIENTS, doubtful_values, has_other_data

__all__ = ["ALL", "ChosenExamples", "DataPart", "WhereInData", "choose_examples", "overlap"]

ALL = "all"
DataPart = Literal["train", "test", "all"]


class _Joined:
    """Several subsets as one, in order."""

    def __init__(self, subsets: Sequence[Subset]) -> None:
        self.subsets = subsets

    def __len__(self) -> int:
        return sum(map(len, self.subsets))

    @property
    def targets(self) -> Tensor:
        """The targets of all examples."""
        return torch.cat([subset.targets for subset in self.subsets])

    @property
    def units(self) -> Tensor | None:
        """The unit (patient) of each example; the subsets are of one data set, so all of them have units or none."""
        units = [subset.units for subset in self.subsets]
        return None if units[0] is None else torch.cat([one for one in units if one is not None])

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return the examples at ascending positions."""
        batches, start = [], 0
        for subset in self.subsets:
            inside = positions[(positions >= start) & (positions < start + len(subset))]
            if len(inside):
                batches.append(subset.batch(inside - start, generator))
            start += len(subset)
        inputs, targets = zip(*batches, strict=True)
        return torch.cat(inputs), torch.cat(targets)


class WhereInData(NamedTuple):
    """Where the examples are in the user's data: the first columns of ``predictions.csv``, and its order."""

    column: str
    names: Sequence[int | str]  # of all rows
    numbers: Indices  # the row of each example
    beside: Mapping[str, Sequence[str]] = {}  # client, patient or domain of all rows, by the name of the column


@dataclass(frozen=True)
class ChosenExamples:
    """The chosen examples of some data.

    Attributes:
        data: its held-out clients are those of the run if the data are those of the run.
        part: which examples of the data.
        rows: where they are in the user's files, for own data.
    """

    data: PartitionedData
    part: DataPart
    rows: OwnRows | None

    def everyone(self) -> Subset | _Joined:
        """Return the examples of all but held-out clients."""
        return _joined([piece.test_view() for piece in self._pieces()])

    def groups(self) -> dict[str, Subset | _Joined]:
        """Return the examples of each group by name, those of held-out clients, too."""
        groups: dict[str, list[Subset]] = {}
        for piece in self._pieces():
            for name, view in replace(piece, held_out=()).domain_views().items():
                groups.setdefault(name, []).append(view)
        return {name: _joined(views) for name, views in groups.items()}

    def doubts(self) -> list[str]:
        """Return what looks wrong in the values of the inputs, of the first piece that has such."""
        for piece in self._pieces():
            if doubts := doubtful_values(piece.dataset.test, scaled=bool(piece.dataset.mean)):
                return doubts
        return []

    def place(self) -> WhereInData:
        """Return where the examples of ``everyone`` are."""
        pieces = self._pieces()
        sizes = [len(piece.dataset.test) for piece in pieces]
        column: str = "index"
        names: Sequence[int | str] = range(sum(sizes))
        beside: Mapping[str, Sequence[str]] = self._domains()
        numbers = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        if self.rows:
            train, test = self.rows.train, self.rows.test
            column, names, beside = self.rows.column, self.rows.names, self.rows.beside
            numbers = {"train": [train], "test": [test], "all": [train, test]}[self.part]
        for at, piece in enumerate(pieces):
            if piece.held_out:
                numbers[at] = np.delete(numbers[at], np.concatenate([tests for _, tests in piece.held_out]))
        return WhereInData(column, names, np.concatenate(numbers), beside)

    def _domains(self) -> dict[str, Sequence[str]]:
        """Return the domain of each example; empty if the data have none."""
        known, domains = self.data.dataset.group_names, list[str]()
        for piece in self._pieces():
            if (groups := piece.dataset.test.groups) is not None:
                domains += [known[number] for number in groups.tolist()]
        return {"group": domains} if domains else {}

    def _pieces(self) -> list[PartitionedData]:
        """Return data whose test examples are the chosen ones; two for the training and the test examples."""
        test = self.data
        held_out = tuple((train, train) for train, _ in test.held_out)
        train = replace(test, dataset=replace(test.dataset, test=test.dataset.train), held_out=held_out)
        return {"train": [train], "test": [test], "all": [train, test]}[self.part]


def _joined(subsets: Sequence[Subset]) -> Subset | _Joined:
    return subsets[0] if len(subsets) == 1 else _Joined(subsets)


def choose_examples(
    saved: SavedModel, config: Config, data: PartitionedData, part: DataPart | Literal[""]
) -> ChosenExamples:
    """Return the examples of a part of the new data; those of the run's held-out clients count in their groups only.

    Args:
        saved: the model of the run.
        config: the settings of the new data.
        data: the new data.
        part: "" = all of own data without a split of their own that are not those of the run, else the test examples.

    Raises:
        ConfigError: test examples of the run's data may be training examples of the run, as the data have changed.
    """
    rows = own_rows(config.own_data()) if is_own(config.dataset) else None
    undivided = rows is not None and not rows.divided
    same = _location(config) == _location(saved.config)
    if not part:
        part = "all" if undivided and not same else "test"
    changed = same and has_other_data(saved.run, config)
    if undivided and part == "test" and changed:
        raise ConfigError(
            f"part=test: dataset={config.dataset!r} has changed since the run, or is divided in another way "
            "(test-share, group-column), so its test examples may be training examples of the run. Restore the data "
            "and the settings, or put the examples that the run has not seen into a file of their own."
        )
    if saved.config.held_out_clients and same and not changed:
        data = _with_held_out(data, saved.config, config)
    return ChosenExamples(data, part, rows)


def _with_held_out(data: PartitionedData, ran: Config, config: Config) -> PartitionedData:
    """Return the data of a run with its held-out clients, whose examples do not count in a test of all."""
    here = {key: getattr(config, key) for key in ("dataset", "data_dir", "device")}
    ran = ran.model_copy(update=here)
    split = partitioned_data(ran, count_clients(ran))
    return replace(data, held_out=split.held_out, held_out_names=split.held_out_names)


def overlap(config: Config, saved: SavedModel) -> str:
    """Return a sentence if the files of a run's data and of others lie one in the other; else "".

    Those of one client that was held out have no training examples.
    """
    ran = saved.config
    (kind, here), (other, there) = _location(config), _location(ran)
    if kind != other or here == there or not isinstance(here, Path) or not isinstance(there, Path):
        return ""
    if not (here.is_relative_to(there) or there.is_relative_to(here)):
        return ""
    held_out = read_json(saved.run / "data.json").get(HELD_OUT_CLIENTS, {})
    if here.parent == there and (here.stem if kind == "csv" else here.name) in held_out:
        return ""
    return (
        f"dataset={config.dataset!r} and the data of the run, {ran.dataset!r}, have files in common: training examples "
        f"of the run may be among them. With --dataset {ran.dataset} its test examples alone are used, by group, too."
    )


def _location(config: Config) -> tuple[str, Path | str]:
    """Return the kind of a config's data and where they are, however the path is spelled."""
    kind, _, path = config.dataset.partition(":")
    return kind, Path(path).resolve() if path and kind != "hf" else path
