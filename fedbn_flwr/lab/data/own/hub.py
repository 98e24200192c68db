"""Data sets of the Hugging Face hub, through flwr-datasets: ``hf:NAME``, which needs the network or a local folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.data.image_files import DEEP, MODES, as_bytes
from fedbn_flwr.lab.data.names import one_form
from fedbn_flwr.lab.data.own.arrays import as_inputs
from fedbn_flwr.lab.data.own.features import features_of, numbered_column, stated_features, with_numbers
from fedbn_flwr.lab.data.own.records import Inputs, Records, Targets
from fedbn_flwr.lab.data.own.request import OwnData, shown
from fedbn_flwr.lab.data.own.targets import read_targets

__all__ = ["read_hub"]

_LABELS = ("label", "labels", "fine_label", "target", "digit", "y")


def read_hub(request: OwnData) -> Records:
    """Return the splits "train" and "test" (or "validation") of a data set of the hub.

    A column of images gives the inputs; without one the columns are features, as in a table.

    Raises:
        ConfigError: a column of the config is not there.
        DataError: the data set cannot be read.
    """
    parts = _splits(request)
    kinds = parts[0].features
    label = _label_column(request, list(kinds))
    rows = [part.with_format(None)[:] for part in parts]
    tests = np.repeat([False, True], [len(part) for part in parts]) if len(parts) > 1 else None
    targets = _targets(request, label, getattr(kinds[label], "names", None) or (), rows)
    image = next((name for name, kind in kinds.items() if type(kind).__name__ == "Image"), "")
    inputs = _images(request, _column(rows, image)) if image else _features(request, label, parts, tests)
    client, group = request.client_column, request.group_column
    clients, client_names = numbered_column(request, client, _column(rows, client)) if client else (None, ())
    units, unit_names = numbered_column(request, group, _column(rows, group)) if group else (None, ())
    return Records(
        inputs=inputs,
        targets=targets,
        clients=clients,
        client_names=client_names,
        units=units,
        unit_names=unit_names,
        tests=tests,
    )


def _column(rows: Sequence[Any], name: str) -> list[Any]:
    return [value for part in rows for value in part[name]]


def _splits(request: OwnData) -> list[Any]:
    """Return the training part and, if there is one, the test part."""
    from flwr_datasets import FederatedDataset
    from flwr_datasets.partitioner import IidPartitioner

    if not request.path:
        raise ConfigError("dataset='hf:' needs a name, hf:NAME.")
    try:
        data = FederatedDataset(dataset=request.path, partitioners={"train": IidPartitioner(1)}, shuffle=False)
        parts = [data.load_split("train")]
        names = [name for name in ("test", "validation", "valid") if name in data._dataset]
        parts += map(data.load_split, names[:1])
    except Exception as error:  # the hub's client raises errors of many packages
        raise DataError(
            f"dataset={request.name!r} cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:300]}. "
            "It needs the network the first time; or give a local folder that datasets.load_dataset reads."
        ) from error
    return parts


def _label_column(request: OwnData, columns: list[str]) -> str:
    """Return the column with the targets; ConfigError unless there is one and the keys name columns."""
    label = request.label_column or next((name for name in _LABELS if name in columns), "")
    keys = {"label-column": label, "client-column": request.client_column, "group-column": request.group_column}
    wrong = {key: name for key, name in keys.items() if name and name not in columns}
    listing = f"dataset={request.name!r}; it has {shown(columns, 20)}."
    problems = [f"{key}={name!r} is not a column of {listing}" for key, name in wrong.items()]
    if not label:
        problems.append(f"label-column is not set: name the target among the columns {shown(columns, 20)}.")
    if problems:
        raise ConfigError("\n".join(problems))
    return label


def _targets(request: OwnData, label: str, names: Sequence[str], rows: Sequence[Any]) -> Targets:
    """Return the targets from a column, whose numbers stand for these names if there are any."""
    values = np.concatenate([np.asarray(part[label]) for part in rows])
    if names and (values < 0).any():
        raise request.problem(
            f"{int((values < 0).sum())} examples have no label (-1). Save a data set without "
            "them, or with another test part."
        )
    if names and not request.positive_values:  # the numbers of some classes are not those of their names
        names = [one_form(name) for name in names]
        values = np.array(names, object)[values]
    return read_targets(request, values, f"column {label!r}", names=names)


def _features(request: OwnData, label: str, parts: Sequence[Any], tests: Any) -> Inputs:
    """Return the features of rows: the columns of the config, else all that no key names."""
    import pandas as pd

    table = with_numbers(pd.concat([part.to_pandas() for part in parts], ignore_index=True))
    taken = {label, request.client_column, request.group_column}
    wanted = stated_features(request.feature_columns)
    wanted = wanted or [(name, ()) for name in parts[0].column_names if name not in taken]
    return features_of(request, table, wanted, tests)


def _images(request: OwnData, pictures: list[Any]) -> Inputs:
    """Return the images as bytes; they must have one size."""
    from PIL import Image

    sizes = {picture.size for picture in pictures}
    if len(sizes) > 1:
        raise DataError(
            f"dataset={request.name!r} has images of {len(sizes)} sizes, such as {shown([str(s) for s in sizes], 3)}. "
            "Save them as files and use dataset=folder:PATH, which resizes them."
        )
    deep = DEEP if request.window() else DEEP[:4]
    pictures = [Image.fromarray(as_bytes(np.asarray(p), request.window())) if p.mode in deep else p for p in pictures]
    if odd := sorted({picture.mode for picture in pictures} - set(MODES)):
        raise DataError(
            f"dataset={request.name!r} has images whose pixels are not bytes (mode {shown(odd)}). Save them with "
            "8 bits for each channel."
        )
    grey = all(picture.mode == "L" for picture in pictures)
    return as_inputs(request, np.stack([np.asarray(p if grey else p.convert("RGB")) for p in pictures]), "images")
