"""The command ``fedbn-flwr evaluate``, for a finished run's model on any data."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.reestimation import load_statistics, reestimate_statistics
from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError, EngineError
from fedbn_flwr.lab.config import Config, data_of
from fedbn_flwr.lab.data import (
    FUNCTION,
    Dataset,
    OwnData,
    Subset,
    is_own,
    own_data,
)
from fedbn_flwr.lab.finished_runs.saved_model import Choice, SavedModel, saved_model
from fedbn_flwr.lab.output.folder import RunFolder
from fedbn_flwr.lab.output.summary import ModelDescription
from fedbn_flwr.lab.partitioned.check_data import has_other_data
from fedbn_flwr.lab.partitioned.partitioned_data import load_data
from fedbn_flwr.lab.setup import on_device
from fedbn_flwr.training.evaluation import EvalResult, evaluate
from fedbn_flwr.training.tasks import (
    CLASSIFICATION,
    SEGMENTATION,
    LabelTask,
    RegressionTask,
    Task,
)

logger = logging.getLogger("flwr")

ADAPT = "adapt"
"""The BN with statistics re-estimated on the new inputs; no target is used."""
ALL = "all"

_CLIENT = re.compile(r"own:(\d+)")
# settings of the run on which the model and its inputs depend
_OF_THE_MODEL = ("norm", "norm-groups", "model", "bn-momentum", "seed", "batch-size")
# settings for reading the data, taken from the run unless the new data set others
_OF_READING = ("task", "metrics", "test-share")
# keys that describe new data
_OF_DATA = ("dataset", "data-dir", "image-size", "num-classes", "device", *_OF_READING)


@dataclass(frozen=True)
class Row:
    """The result on all examples or on the examples of one group."""

    data: str
    result: EvalResult


class Evaluation(NamedTuple):
    """The results of ``evaluate_run``.

    Attributes:
        what: a description of the model and of its examples.
        rows: the results, first on all data, then by group.
    """

    what: str
    rows: list[Row]


def evaluate_run(
    run: Path,
    data: Mapping[str, Any],
    bn: str = "",
    out: Path | None = None,
    state_dir: Path | None = None,
) -> Evaluation:
    """Evaluate the model of a run on any data.

    The run determines the model, the normalisation of the inputs and the shape of the
    images. The test examples of the data are used. There is one exception: own data
    that are not the run's data and have no split are used as a whole.

    Args:
        run: the run's folder.
        data: config keys of the data, at least ``dataset``. The run's values of
            ``task``, ``metrics`` and ``test-share`` are the defaults, and for own data
            its number of classes. Its values of ``data-dir``, ``image-size`` and
            ``device`` are not used.
        bn: "" for the global model, "averaged" for the average of the clients' BN,
            "own:CLIENT" for the own model of a client, ``ADAPT`` for the global model
            with statistics that are re-estimated on these inputs.
        out: a new folder for ``predictions.csv`` and ``metrics.json``; None writes
            nothing.
        state_dir: the state folder of a site, for the site's own model. If the folder
            has several clients, ``bn`` "own:CLIENT" chooses the client.

    Raises:
        ConfigError: the data do not fit the model, a setting is bad, or the run's own
            data have changed.
        DataError: the data are missing, or do not fit the task.
        StateError: the run lacks the model, or a part of it.
        EngineError: the folder cannot be written.
    """
    # Refuse a used folder before any work. Then combine the settings of the run and of
    # the new data, and load the examples.
    if out is not None:
        RunFolder.refuse_used(out)
    saved = saved_model(run, _choice(bn, state_dir))
    config = _config(saved, data)
    examples = _examples(saved, config)
    model, task = on_device(saved.model, config), data_of(config).test_task
    if bn == ADAPT:
        _adapt(model, examples.all, task, saved)
    warnings = [
        saved.description.code_changed(),
        overlap(saved.config.dataset, config.dataset),
    ]
    warnings = [warning for warning in warnings if warning]
    for warning in warnings:
        logger.warning("%s", warning)

    # Test, and keep the outputs for predictions.csv. Do not keep outputs for each
    # pixel, because their table would be larger than the images.
    outputs: list[Tensor] = []

    def keep(of_batch: Tensor, _: Tensor) -> None:
        if out is not None and not task.by_pixel:
            outputs.append(of_batch.cpu())

    rows = [Row(ALL, evaluate(model, examples.all, task=task, on_batch=keep))]
    for name, view in examples.groups.items():
        rows.append(Row(name, evaluate(model, view, task=task)))

    what = f"{saved.what}; {examples.which}"
    if out is not None:
        about = {"model": what, "dataset": config.dataset, "warnings": warnings}
        files = {"metrics.json": _json(about, rows)}
        if outputs:
            targets, classes = examples.all.targets, saved.description.classes
            columns = predictions(torch.cat(outputs), targets, task, classes)
            files["predictions.csv"] = as_csv({**examples.where, **columns})
        write_files(out, files)
    return Evaluation(what, rows)


def _choice(bn: str, state_dir: Path | None) -> Choice:
    """Return the choice of the model that ``bn`` names.

    For ``ADAPT``, it is the model that is adapted afterwards.
    """
    if bn in ("", ADAPT):
        return Choice(state_dir=state_dir)
    if bn == "averaged":
        return Choice(averaged=True, state_dir=state_dir)
    client = _CLIENT.fullmatch(bn)
    if client is None:
        raise ConfigError(
            f"bn={bn!r} is unknown. Allowed: averaged, own:CLIENT (e.g. own:2),"
            f" {ADAPT}, or no bn."
        )
    return Choice(client=int(client[1]), state_dir=state_dir)


def _adapt(model: nn.Module, data: Subset, task: Task, saved: SavedModel) -> None:
    """Replace the model's BN statistics by statistics of these inputs.

    Raises:
        ConfigError: re-estimation is impossible without BatchNorm, or with one example.
    """
    moments = reestimate_statistics(model, data, batch_size=task.test_batch)
    if not moments:
        raise ConfigError(
            f"bn={ADAPT} re-estimates BN statistics from two or more examples. The data"
            f" have {len(data)}, and model={saved.config.model} with"
            f" norm={saved.config.norm} needs BatchNorm. Leave bn out."
        )
    load_statistics(model, moments)


def _config(saved: SavedModel, data: Mapping[str, Any]) -> Config:
    """Return the settings of the run's model and of the new data.

    Raises:
        ConfigError: a setting does not describe data, or its value is wrong.
    """
    of_run = saved.config.to_mapping()
    others = [key for key in data if key in of_run and key not in _OF_DATA]
    if others:
        raise ConfigError(
            f"{', '.join(others)}: evaluate takes keys that describe the data"
            f" ({', '.join(_OF_DATA)}); all other settings come from the run, and"
            " the new data are not split over clients. Remove these keys."
        )
    shared = {key: of_run[key] for key in (*_OF_THE_MODEL, *_OF_READING)}
    settings = {"partition": "iid", "num-clients": 1, **data}
    dataset = str(data.get("dataset"))
    if is_own(dataset):
        # Take the task and the number of classes from the run, because the targets of a
        # few examples may look like another task or lack a class.
        shared["task"] = saved.description.task
        if saved.description.task in (CLASSIFICATION.name, SEGMENTATION.name):
            shared["num-classes"] = saved.description.num_classes
        # A user's function is called once for each site. Call it for all sites of the
        # run.
        if OwnData.parse(dataset)[0] == FUNCTION:
            settings["num-clients"] = saved.config.num_clients
            if dataset == saved.config.dataset:
                settings["num-clients"] = len(data_of(saved.config).own.sites)
    return Config.make_of_shared(shared, settings)[0]


class _Examples(NamedTuple):
    """The examples of a test.

    Attributes:
        all: all examples.
        groups: the examples of each group (domain) by name; empty without groups.
        where: the first columns of ``predictions.csv``. They show the place of each
            example in the user's data.
        which: a text for messages: the examples are all examples of the data, or only
            its test examples.
    """

    all: Subset
    groups: Mapping[str, Subset]
    where: Mapping[str, Sequence[Any]]
    which: str


def _examples(saved: SavedModel, config: Config) -> _Examples:
    """Return the examples of the new data with the normalisation of the run.

    Raises:
        ConfigError: the data do not fit the model, or test examples may be training
            examples of the run.
    """
    taken = saved.description
    # Check the task before loading the data, because loading may take long.
    info = data_of(config).info
    refuse_other_task(taken, data_of(config).task, info.num_classes, config.dataset)
    # If own data have no split, use all examples as test examples. But if they are the
    # run's data, use the test examples of the run.
    which = "on the test examples"
    if is_own(config.dataset) and not own_data(data_of(config).own).divided:
        if place(config.dataset) != place(saved.config.dataset):
            which = "on all examples"
            config = config.model_copy(update={"test_share": 1.0})
        elif has_other_data(saved.run, config):
            raise ConfigError(
                f"dataset={config.dataset!r} has changed since the run, or is divided"
                " in another way (test-share), so its test examples may be training"
                " examples of the run. Restore the data and the settings, or put the"
                " examples that the run has not seen into a separate folder."
            )
    data = load_data(config, taken.shape if len(taken.shape) == 3 else ())
    refuse_unfit(taken, data, config.dataset)

    # Use the run's mean and std, because the model was trained on inputs with this
    # normalisation.
    def view(indices: Tensor | None = None) -> Subset:
        return Subset(data.test, indices, mean=taken.mean, std=taken.std)

    groups = {}
    numbers = data.test.groups
    if numbers is not None:
        for number in torch.unique(numbers).tolist():
            chosen = torch.nonzero(numbers == number).flatten()
            groups[data.group_names[number]] = view(chosen)
    own = data_of(config).own if is_own(config.dataset) else None
    return _Examples(view(), groups, where_in(data, own), which)


def where_in(data: Dataset, own: OwnData | None) -> dict[str, Sequence[Any]]:
    """Return the columns that show the place of each test example in the user's data.

    Args:
        data: the data.
        own: the request of own data; None for registered data.
    """
    # Name the file or the row of each example, because the user cannot find an example
    # by its position in the data set.
    places = {} if own is None else own_data(own).tests
    if places:
        return {**places}
    where: dict[str, Sequence[Any]] = {"index": range(len(data.test))}
    if data.test.groups is not None:
        numbers = data.test.groups.tolist()
        where["group"] = [data.group_names[number] for number in numbers]
    return where


def place(dataset: str) -> tuple[str, Path | str]:
    """Return the kind and the place of data, with a resolved path.

    Two names of the same data have equal results.
    """
    kind, _, path = dataset.partition(":")
    return kind, Path(path).resolve() if path else path


def overlap(ran: str, dataset: str) -> str:
    """Return a sentence if one of two folders of data contains the other, or "".

    Args:
        ran: the ``dataset`` of the run.
        dataset: the name of the new data.
    """
    (kind, here), (other, there) = place(dataset), place(ran)
    # If both have the same place, they are the run's own data, and only their test
    # examples are used.
    if kind != other or here == there:
        return ""
    if not isinstance(here, Path) or not isinstance(there, Path):
        return ""
    if not (here.is_relative_to(there) or there.is_relative_to(here)):
        return ""
    return (
        f"dataset={dataset!r} and the data of the run, {ran!r}, have"
        " files in common. Training examples of the run may be among them, unless they"
        " belong to a held-out client."
    )


def refuse_other_task(
    taken: ModelDescription, task: Task, num_classes: int, dataset: str
) -> None:
    """Raise ConfigError if the data have another task or number of classes."""
    if task.name != taken.task:
        raise ConfigError(
            f"the model is for {taken.task}, but the data are for {task.name}."
        )
    if num_classes != taken.num_classes:
        raise ConfigError(
            f"the data of the run have {taken.num_classes} classes, but"
            f" dataset={dataset} has {num_classes}. Give these data the classes"
            " of the run, in the same order."
        )


def refuse_unfit(taken: ModelDescription, data: Dataset, dataset: str) -> None:
    """Raise ConfigError if the data have another shape or other names of classes."""
    if data.test.shape != taken.shape:
        raise ConfigError(
            f"the model takes inputs {taken.shape}, but the inputs of"
            f" dataset={dataset} are {data.test.shape}. Use data with as many channels"
            " or features, and of the same height and width."
        )
    known, given = _names(taken.classes), _names(data.class_names)
    if known and given and known != given:
        raise ConfigError(
            f"the classes of the run are {', '.join(known)}, but the classes of"
            f" dataset={dataset} are {', '.join(given)}. Use the same names."
        )


def _names(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the names of classes, or () if each name is only the class's number."""
    if list(classes) == [str(number) for number in range(len(classes))]:
        return ()
    return tuple(classes)


def predictions(
    outputs: Tensor, targets: Tensor | None, task: Task, classes: Sequence[str]
) -> dict[str, list[float]]:
    """Return the columns target, prediction and probability of ``predictions.csv``.

    Args:
        outputs: the model's outputs (N, ...).
        targets: the targets of the examples (N, ...); None leaves the column out.
        task: the learning task.
        classes: the names of the classes or labels.
    """
    count = len(outputs)
    # Compute in double precision. In single precision, probabilities near 1 become 1.
    outputs, probabilities = outputs.double().reshape(count, -1), task.probabilities()
    values = {}
    if targets is not None:
        values["target"] = targets.cpu().reshape(count, -1)
    if isinstance(task, LabelTask):
        # An output above 0 is a probability above one half.
        values["prediction"] = (outputs > 0).long()
        positive = f"-{classes[-1]}" if task.single and classes else ""
        values[f"probability{positive}"] = probabilities(outputs)
    elif isinstance(task, RegressionTask):
        values["prediction"] = outputs
    else:
        values["prediction"] = outputs.argmax(1, keepdim=True)
        values["probability"] = probabilities(outputs)
    # If there are several columns of one kind, add the name of the class to each.
    columns: dict[str, list[float]] = {}
    for kind, value in values.items():
        for at, column in enumerate(value.T.tolist()):
            name = kind
            if value.shape[1] > 1:
                name = f"{kind}-{classes[at] if at < len(classes) else at}"
            columns[name] = column
    return columns


def as_csv(columns: Mapping[str, Sequence[Any]]) -> str:
    """Return a table as the text of a CSV file."""
    import pandas as pd

    table = pd.DataFrame(columns)
    # Nine digits give the same float32 when the file is read again.
    text: str = table.to_csv(index=False, float_format="%.9g", na_rep="nan")
    return text


def _json(about: Mapping[str, Any], rows: Sequence[Row]) -> str:
    results = []
    for row in rows:
        about_row: dict[str, Any] = {
            "data": row.data,
            "examples": row.result.num_examples,
        }
        # JSON has no NaN.
        for name, value in row.result.named().items():
            about_row[name] = None if math.isnan(value) else value
        results.append(about_row)
    return json.dumps({**about, "results": results}, indent=2, allow_nan=False) + "\n"


def write_files(out: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files into a folder, each atomically.

    Raises:
        EngineError: they cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_atomically(out / name, text)
    except OSError as error:
        raise EngineError(f"out={str(out)!r} cannot be written: {error}.") from error
