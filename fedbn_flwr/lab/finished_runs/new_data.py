"""New data for the model of a run: their settings, whether the model takes them, and their normalisation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.data import FUNCTION, Dataset, OwnData, as_list, is_own, table_columns
from fedbn_flwr.lab.finished_runs.saved_model import SavedModel
from fedbn_flwr.lab.output.model_description import ModelDescription
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData, partitioned_data

__all__ = ["config_of_data", "data_for_model"]

# Settings of a run that the model and its inputs depend on; all others are those of the new data.
_OF_THE_MODEL = (
    "norm",
    "norm-groups",
    "model",
    "bn-momentum",
    "seed",
    "batch-size",
)
# Settings that say how data are read: those of the run, unless the new data have others.
_OF_READING = (
    "task",
    "metrics",
    "main-metric",
    "label-column",
    "client-column",
    "group-column",
    "split-column",
    "feature-columns",
    "positive-values",
    "class-names",
    "missing",
    "missing-values",
    "decimal",
    "encoding",
    "skip-unreadable",
    "intensity-range",
    "test-share",
    "input-shape",
)
_OF_DATA = ("dataset", "data-dir", "image-size", "num-classes", "device", *_OF_READING)
_COLUMNS = ("client-column", "group-column", "split-column")  # a table of another place may lack them
_OWN_SCALE = (
    "inputs have the mean and std of the training part of these data, since the run standardised each client by its "
    "own: a row's output depends on the other rows (bn=own:CLIENT uses that client's mean and std)"
)


def config_of_data(saved: SavedModel, data: Mapping[str, Any]) -> Config:
    """Return the settings of the run's model with those of the new data.

    Raises:
        ConfigError: a setting does not describe data, or is bad.
    """
    of_run, taken = saved.config.to_mapping(), saved.description
    if others := [key for key in data if key in of_run and key not in _OF_DATA]:
        raise ConfigError(
            f"{', '.join(others)}: evaluate takes keys that describe the data ({', '.join(_OF_DATA)}); all others are "
            "those of the run, and the new data are not split over clients. Leave them out."
        )
    shared = {key: of_run[key] for key in (*_OF_THE_MODEL, *_OF_READING) if key in of_run}
    dataset = str(data.get("dataset"))
    if is_own(dataset):
        shared["task"] = taken.task  # targets of a few examples may look like those of another one
        if not taken.classes and taken.task in ("classification", "segmentation"):
            shared["num-classes"] = taken.num_classes
    kind, path = OwnData.parse(dataset) if is_own(dataset) else ("", "")
    if kind == "csv" and path:
        encoding = str({**shared, **data}.get("encoding", ""))
        columns = table_columns(OwnData(kind, path, encoding=encoding))
        absent = [key for key in _COLUMNS if shared.get(key) not in columns]
        if Path(path).is_dir():  # each table is a client's
            absent.append("client-column")
        shared = {key: value for key, value in shared.items() if key not in absent}
    # A function gives the data of a site: those of the sites of the run, all in one.
    settings = {"partition": "iid", "num-clients": saved.config.num_clients if kind == FUNCTION else 1, **data}
    return Config.make_of_shared(shared, settings)[0]


def data_for_model(saved: SavedModel, config: Config, stated: Collection[str]) -> tuple[PartitionedData, list[str]]:
    """Return the new data with the normalisation of the run, and what a reader of the results must know of them.

    Args:
        saved: the model of the run.
        config: the settings of the new data.
        stated: keys by which the user gave the order of the classes, if any.

    Raises:
        ConfigError: the data do not fit the model.
    """
    taken = saved.description
    _refuse(_problems_of_settings(taken, config))  # without the data, which may be large
    data = partitioned_data(config, 1, taken.shape if len(taken.shape) == 3 else ())
    _refuse(_problems_of_data(taken, data.dataset, config.dataset, stated))
    notes = [f"the positive class is {taken.positive}"] if taken.positive else []
    known, given = _names(taken.classes), _names(data.dataset.class_names)
    if bool(given) != bool(known):
        named = data.dataset.class_names or taken.classes
        numbered = ", ".join(f"{number} = {name}" for number, name in enumerate(named))
        notes.append(f"classes of the {'data' if given else 'run'} by number: {numbered}")
    if saved.lacks_scale:  # each client has its own mean and std, so these data have theirs
        return data, [*notes, _OWN_SCALE]
    return replace(data, dataset=replace(data.dataset, mean=taken.mean, std=taken.std)), notes


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError("\n".join(f"{problem}." for problem in problems))


def _problems_of_settings(taken: ModelDescription, config: Config) -> list[str]:
    """Return how the task, the number of classes and the features differ from those of the model."""
    problems, info = [], config.data_info()
    if taken.task != config.learning_task().name:
        problems.append(f"the model is for {taken.task}, the data are for {config.learning_task().name}")
    if info.num_classes != taken.num_classes:
        named = f"class-names={as_list(taken.classes)} names the absent ones" if taken.classes else ""
        problems.append(
            f"the data of the run have {taken.num_classes} classes, dataset={config.dataset} has {info.num_classes}. "
            "Bring these data to the classes of the run, in the same order"
            + (f"; if they lack some, {named}" if named else "")
        )
    if info.feature_names and taken.features and info.feature_names != taken.features:
        problems.append(
            f"the features of the run are {', '.join(taken.features)}; those of dataset={config.dataset} are "
            f"{', '.join(info.feature_names)}. Name columns and categories in feature-columns, e.g. age,sex:F|M"
        )
    return problems


def _problems_of_data(taken: ModelDescription, data: Dataset, dataset: str, stated: Collection[str]) -> list[str]:
    """Return how the shape of the inputs and the names of the classes differ from those of the model."""
    problems = []
    if data.test.shape != taken.shape:
        problems.append(
            f"the model takes inputs {taken.shape}, those of dataset={dataset} are {data.test.shape}: give "
            "data with as many channels or features, and of the same height and width"
        )
    names, known, given = data.class_names, _names(taken.classes), _names(data.class_names)
    if known and given and names != taken.classes:
        problems.append(f"the classes of the run are {known}, those of dataset={dataset} {given}: name them alike")
    elif given and not known and not stated and data.test.by_class:
        numbers = [str(number) for number in range(max(taken.num_classes, 2))]
        said = "the names in the order of the numbers"
        if set(names) <= {*numbers}:  # some of them are absent here
            said, names = "those of the run", tuple(numbers)
        problems.append(
            f"the classes of the run are the numbers 0 to {numbers[-1]}, those of dataset={dataset} are "
            f"named {given}: give {said}, class-names={as_list(names)} say"
        )
    return problems


def _names(classes: Sequence[str]) -> str:
    """Return the names of classes as text; "" if they are called by their numbers."""
    return "" if list(classes) == [str(number) for number in range(len(classes))] else ", ".join(classes)
