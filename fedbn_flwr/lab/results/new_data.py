"""New data for the model of a finished run, and the files about its predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError, EngineError, unknown_name
from fedbn_flwr.lab.config.data import in_test_batches, measuring
from fedbn_flwr.lab.data import (
    DATASETS,
    FUNCTION,
    Dataset,
    OwnData,
    Subset,
    is_own,
    load_dataset,
    own_data,
    own_info,
    registered,
)
from fedbn_flwr.lab.data.forms.request import own_task
from fedbn_flwr.lab.objects_of_config import pick_device
from fedbn_flwr.lab.results.files import safe_table
from fedbn_flwr.lab.results.saved_model import SavedModel
from fedbn_flwr.lab.results.summary import ModelDescription
from fedbn_flwr.training.batches import inputs_for
from fedbn_flwr.training.freezing import in_mode
from fedbn_flwr.training.tasks import TASKS, LabelTask, RegressionTask, Task

# the settings of new data; all other settings come from the run
_KEYS = ("data-dir", "device")


@dataclass(frozen=True)
class NewData:
    """New examples for a model.

    Attributes:
        examples: the examples, normalised as in the run.
        groups: the examples of each group, such as a domain, by name.
        where: the columns of ``predictions.csv`` that name the examples.
        classes: the names of the model's classes; a class that the data of the run do
            not have is named by its number.
    """

    examples: Subset
    groups: Mapping[str, Subset]
    where: Mapping[str, Sequence[Any]]
    classes: tuple[str, ...]


def task_of(saved: SavedModel) -> Task:
    """Return the task of a run, with its metrics and the batches of its tests."""
    name = saved.config.task
    plain = own_task(name) if ":" in name else TASKS[saved.description.task]
    task = measuring(plain, saved.config.metrics)
    return in_test_batches(task, saved.description.shape, saved.config.batch_size)


def read_new_data(
    saved: SavedModel, dataset: str, settings: Mapping[str, Any]
) -> NewData:
    """Return the examples of new data with the normalisation of the run.

    All examples of own data are used, or the test examples if the data have a split. A
    function is called once, for site 0.

    Args:
        saved: the model. It determines the task, the classes and the shape.
        dataset: the name of the data.
        settings: the config keys ``data-dir`` and ``device``.

    Raises:
        ConfigError: a setting is not allowed, the data do not fit the model, or they are
            the run's own data.
        DataError: the data are missing, or do not fit the task.
    """
    description = saved.description
    others = ", ".join(key for key in settings if key not in _KEYS)
    if others:
        raise ConfigError(
            f"{others}: new data take only {' and '.join(_KEYS)}. All other settings"
            " come from the run. Remove these keys."
        )
    if is_own(dataset) and place(dataset) == place(saved.config.dataset):
        raise ConfigError(
            f"dataset={dataset!r} are the data of the run. Give data that the run has not"
            " seen. For the run's own sites, use `fedbn-flwr evaluate RUN`."
        )
    # A binary task has one output and two classes.
    count = description.num_classes
    numbers = range(2 if description.task == "binary" else count)
    classes, own = description.classes or tuple(map(str, numbers)), None
    if is_own(dataset):
        kind, path = OwnData.parse(dataset)
        name = saved.config.task if ":" in saved.config.task else description.task
        own = OwnData(kind, path, name, count, test_share=1.0)
        sites = (0,) if kind == FUNCTION else ()
        own = replace(own, sites=sites, known_classes=classes)
    info = registered(dataset) if own is None else own_info(own)
    if info is None:
        raise unknown_name("dataset", dataset, DATASETS)
    # Check the task before loading the data, because loading may take long.
    refuse_other_task(description, info.task, info.num_classes, dataset)
    images = len(description.shape) == 3
    channels, size = description.shape[:2] if images else (None, None)
    device = pick_device(str(settings.get("device", "auto")))
    folder = str(settings.get("data-dir", ""))
    data = load_dataset(info, folder, channels, size, device)
    if not data.test.as_given:
        refuse_unfit(description, data, dataset)

    # Use the run's mean and std, because the model was trained on inputs with this
    # normalisation.
    def view(indices: Tensor | None = None) -> Subset:
        return Subset(data.test, indices, mean=description.mean, std=description.std)

    groups = {}
    numbers_of = data.test.groups
    if numbers_of is not None:
        for number in torch.unique(numbers_of).tolist():
            chosen = torch.nonzero(numbers_of == number).flatten()
            groups[data.group_names[number]] = view(chosen)
    # A model may have more outputs than its data have classes.
    further = range(len(classes), saved.config.num_classes)
    classes += tuple(map(str, further))
    return NewData(view(), groups, where_in(data, own), classes)


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
    """Return a sentence if new data are, or have files of, the data of a run, or "".

    Args:
        ran: the ``dataset`` of the run.
        dataset: the name of the new data.
    """
    (kind, here), (other, there) = place(dataset), place(ran)
    if (kind, here) == (other, there):
        return (
            f"dataset={dataset!r} is the data set of the run: its test examples are not"
            " those of a new site."
        )
    if kind != other or not isinstance(here, Path) or not isinstance(there, Path):
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
    """Raise ConfigError if the data have another shape."""
    if data.test.shape != taken.shape:
        raise ConfigError(
            f"the model takes inputs {taken.shape}, but the inputs of"
            f" dataset={dataset} are {data.test.shape}. Use data with as many channels"
            " or features, and of the same height and width."
        )


def outputs_of(model: nn.Module, examples: Subset, task: Task) -> Tensor:
    """Return the outputs of a model for all examples, (N, ...)."""
    order = torch.split(torch.arange(len(examples)), task.plain_test_batch)
    outputs, prepared = [], inputs_for(model)
    with in_mode(model, False), torch.no_grad():
        for inputs, _ in examples.batches(order):
            outputs.append(model(prepared(inputs)).cpu())
    return torch.cat(outputs)


def predictions(
    outputs: Tensor, targets: Tensor | None, task: Task, classes: Sequence[str]
) -> dict[str, list[Any]]:
    """Return the columns of ``predictions.csv`` with the results.

    They are target, predicted-class, prediction and probability.

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
    columns: dict[str, list[Any]] = {}
    for kind, value in values.items():
        one_of_them = not task.in_columns or getattr(task, "single", False)
        if kind == "prediction" and one_of_them:
            columns["predicted-class"] = [classes[int(one)] for one in value]
        for at, column in enumerate(value.T.tolist()):
            name = kind
            if value.shape[1] > 1:
                name = f"{kind}-{classes[at] if at < len(classes) else at}"
            columns[name] = column
    return columns


def as_csv(columns: Mapping[str, Sequence[Any]]) -> str:
    """Return a table as the text of a CSV file."""
    import pandas as pd

    table = safe_table(pd.DataFrame(columns))
    # Nine digits give the same float32 when the file is read again.
    text: str = table.to_csv(index=False, float_format="%.9g", na_rep="nan")
    return text


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
