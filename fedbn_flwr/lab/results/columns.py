"""Facts about the columns of a table, and how a new table differs from it.

A run on a table saves its facts with the model: for each column the pooled mean and
deviation, the middle half, the largest share of one value, and the values if there are
up to ten. They describe the training examples of all sites together. A run with ``dp`` saves none.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.config import Config, data_of
from fedbn_flwr.lab.data import KINDS, Subset, is_own
from fedbn_flwr.lab.own_code import is_function, own_function

logger = logging.getLogger("flwr")

COLUMNS = "columns"
"""The metadata of ``model.safetensors`` with the facts, as JSON."""

_MIDDLE = torch.tensor([0.25, 0.75], dtype=torch.float64)
# From this distance on, in deviations, a column has another unit, or fails a check.
_FAR = 5.0
# Values of the same column that differ by less are equal, in deviations.
_ROUNDING = 1e-3
# Share of one value from which a column is constant, and the share of normal columns.
_CONSTANT, _VARIES = 0.99, 0.9
# A column with up to so many values has them in its facts; this share of others is odd.
_FEW_VALUES, _ODD = 10, 0.1


def column_names(dataset: str) -> list[str]:
    """Return the attribute ``columns`` of a function of own data, or []."""
    if not (is_own(dataset) and is_function(dataset, KINDS)):
        return []
    function = own_function("dataset", dataset, KINDS)
    return [*map(str, getattr(function, "columns", ()))]


def facts_of_columns(config: Config, view: Subset) -> dict[str, str]:
    """Return the metadata with the facts of a run's training examples.

    It is empty if the examples are not rows of a table, if there are none, or if one
    cannot be read.
    """
    in_rows = len(data_of(config).shape) == 1 and not view.samples.as_given
    if not in_rows or not len(view):
        return {}
    try:
        inputs, _ = view.batch(torch.arange(len(view)))
    except DataError as error:  # the run continued without this site
        logger.warning("the run saves no facts about columns: %s", error)
        return {}
    return {COLUMNS: json.dumps(column_facts(inputs, column_names(config.dataset)))}


def column_facts(inputs: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the facts of each column of (N, D), in JSON values."""
    found = []
    for place, column in enumerate(inputs.cpu().double().T):
        values, counts = torch.unique(column, return_counts=True)
        found.append(
            {
                "name": names[place] if place < len(names) else f"column {place}",
                "mean": float(column.mean()),
                "deviation": float(column.std(correction=0)),
                "middle": torch.quantile(column, _MIDDLE).tolist(),
                "values": values.tolist() if len(values) <= _FEW_VALUES else [],
                "most-frequent": float(values[counts.argmax()]),
                "share": float(counts.max()) / len(column),
            }
        )
    return found


def evidence(
    known: Sequence[Mapping[str, Any]], inputs: Tensor, names: Sequence[str] = ()
) -> list[tuple[str, float, str]]:
    """Return name, distance in deviations and remark of each column, the largest first.

    Args:
        known: the facts of the training sites.
        inputs: the new rows, (N, D).
        names: the names of the new columns, if they are known.
    """
    of_sites = [str(one["name"]) for one in known]
    new = column_facts(inputs, names or of_sites)
    rows = []
    for place, (here, there) in enumerate(zip(new, known, strict=True)):
        unit = there["deviation"] or 1.0
        far = abs(here["mean"] - there["mean"]) / unit
        remarks = [*_remarks(here, there, far)]
        if there["values"]:
            column = inputs[:, place, None].cpu().double()
            apart = (column - column.new_tensor(there["values"])).abs().amin(1) / unit
            odd = float((apart > _ROUNDING).double().mean())
            if odd > _ODD:
                remarks.append(
                    f"{odd:.0%} of the rows have values that no site has: another column,"
                    " order, unit or sign"
                )
        if here["name"] != there["name"]:
            remarks.append(f"the sites have {there['name']} here")
        rows.append((here["name"], far, "; ".join(remarks)))
    return sorted(rows, key=lambda row: (not row[2], -row[1]))


def _remarks(
    here: Mapping[str, Any], there: Mapping[str, Any], far: float
) -> Iterator[str]:
    """Yield the differences of a column from the sites."""
    if here["share"] >= _CONSTANT and there["share"] < _VARIES:
        yield (
            f"{here['share']:.0%} of the rows have the value {here['most-frequent']:.4g}:"
            " constant or missing"
        )
    if far > _FAR:
        yield "outside of the training: another unit, or not scaled"
    elif not there["values"] and not here["values"]:
        (low, high), (least, most) = here["middle"], there["middle"]
        wide = (high - low) / (most - least) if most > least else 1.0
        if wide > _FAR or wide < 1 / _FAR:
            yield f"{wide:.2g} times the spread of the sites: another unit, or not scaled"
