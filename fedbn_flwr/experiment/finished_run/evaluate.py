"""``fedbn-flwr evaluate``: the model of a finished run on any data, with its metrics and predictions."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.adaptation import TEST_BN_MODES, TestBN, evaluate_adapted
from fedbn_flwr.batchnorm.parts import Part, split_state
from fedbn_flwr.batchnorm.reestimation import load_statistics, reestimate_statistics
from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.data import OwnData, OwnRows, Subset, is_own, own_rows, table_columns
from fedbn_flwr.data.splits import Indices
from fedbn_flwr.errors import ConfigError, EngineError, unknown_name
from fedbn_flwr.experiment.config import Config
from fedbn_flwr.experiment.data.partitioned_data import PartitionedData, count_clients, partitioned_data
from fedbn_flwr.experiment.data.report import doubtful_values, has_other_data
from fedbn_flwr.experiment.finished_run.saved_model import Choice, SavedModel, load_model
from fedbn_flwr.experiment.output.folder import RunFolder
from fedbn_flwr.experiment.setup import on_device
from fedbn_flwr.server.method import TEST_BN
from fedbn_flwr.training.evaluation import EvalResult
from fedbn_flwr.training.tasks import LabelTask, RegressionTask, Task

__all__ = ["ADAPT", "DataPart", "Row", "evaluate_run"]

logger = logging.getLogger("flwr")

DataPart = Literal["train", "test", "all"]
ADAPT = "adapt"
"""The BN whose statistics are re-estimated on the new inputs; no target is used."""

_OWN = re.compile(r"own:(\d+)")
# Settings of a run that the model and its inputs depend on; all others are those of the new data.
_OF_THE_MODEL = (
    *("norm", "norm-groups", "wsconv-gain", "activation", "renorm-rmax", "renorm-dmax", "model"),
    *("bn-momentum", "memory-format", "seed"),
)

# Settings that say how data are read: those of the run, unless the new data have others.
_OF_READING = (
    *("task", "metrics", "label-column", "client-column", "group-column", "split-column", "feature-columns"),
    *("positive-values", "class-names", "missing", "skip-unreadable", "test-share", "cache-gib", "data-workers"),
)
_OF_TEST_BN = ("test-bn-prior", "test-bn-alpha", "test-bn-tau", "test-bn-batch-size")
_OF_DATA = ("dataset", "data-dir", "image-size", "num-classes", "device", *_OF_TEST_BN, *_OF_READING)
_OWN_SCALE = (
    "inputs have the mean and std of the training part of these data, since the run standardised each client by its own"
)
_PARTS = {"train": "the training examples", "test": "the test examples", "all": "all examples"}
_COLUMNS = ("client-column", "group-column", "split-column")


@dataclass(frozen=True)
class Row:
    """The result on some of the data: all, or those of one group; with which BN statistics."""

    data: str
    statistics: str
    result: EvalResult


def evaluate_run(
    run: Path,
    data: Mapping[str, Any],
    bn: str = "",
    part: DataPart | Literal[""] = "",
    out: Path | None = None,
) -> tuple[str, list[Row]]:
    """Evaluate the model of a run on any data.

    The run gives the model, the normalisation of the inputs and the size of the images; ``data`` gives the rest. What
    reading the data left out or changed is logged, and what makes the results doubtful, as warnings.

    Args:
        run: the run's folder.
        data: config keys of the data, at least ``dataset``; for own data those of the run are the defaults. Beside a
            mode of test-time BatchNorm its ``test-bn-...``, too.
        bn: "" for the global model, "averaged" or "own:CLIENT" for that BN, ``ADAPT``, or a mode of ``TestBN``: each
            group of the data then has statistics of its own inputs.
        part: the examples to use; "" = all of own data without a split of their own that are not those of the run, else
            the test examples.
        out: a new folder for ``predictions.csv`` and ``metrics.json``; None = nothing is written.

    Returns:
        What model it is and how the data become its inputs and targets, and the results: with all data first, then by
        group. With ``ADAPT`` or a mode of ``TestBN`` those of the statistics as saved come first.

    Raises:
        ConfigError: the data do not fit the model, or a setting is bad.
        DataError: the data are missing, or do not fit the task.
        StateError: the run lacks the model, or a part of it.
        EngineError: the folder cannot be written.
    """
    if part and part not in get_args(DataPart):
        raise unknown_name("part", part, get_args(DataPart))
    if out is not None:
        RunFolder.refuse_used(out)
    saved = load_model(run, _choice(bn))
    config = _config_of_data(saved, data, bn)
    found, notes = _data(saved, config, {"class-names", "positive-values"} & data.keys())
    own = own_rows(config.own_data()) if is_own(config.dataset) else None
    same = _place_of(config) == _place_of(saved.config)
    new = own is not None and not own.divided and not same
    part = part or ("all" if new else "test")
    changed = same and has_other_data(run, config)
    if own is not None and not own.divided and part == "test" and changed:
        raise ConfigError(
            f"part=test: dataset={config.dataset!r} has changed since the run, or is divided in another way "
            "(test-share, group-column), so its test examples may be training examples of the run. Restore the data "
            "and the settings, or put the examples that the run has not seen into a file of their own."
        )
    if saved.config.held_out_clients and same and not changed:
        found = _without_held_out(found, saved.config, config)
        notes.append(f"without the held-out clients ({', '.join(found.held_out_names)})")
    what = "; ".join([saved.what, *notes, f"on {_PARTS[part]}"])
    parts = _parts(found, part)
    info = config.data_info()
    told = info.notes
    of_run = filter(None, [saved.description.code_changed(), _overlap(config, saved.config)])
    warnings = [*of_run, *info.warnings, *_doubts(parts)]
    for level, texts in ((logging.INFO, told), (logging.WARNING, warnings)):
        for text in texts:
            logger.log(level, "%s", text)
    chosen, groups = _views(parts)
    model, task = on_device(saved.model, config), config.learning_task()
    by = config.test_bn_settings()
    statistics: dict[str, TestBN | None] = {"as saved": None}
    statistics |= {"re-estimated": None} if bn == ADAPT else {str(by): by} if by else {}
    if by and Part.STATISTICS not in split_state(model).part_of.values():
        raise ConfigError(f"bn={bn} needs BatchNorm with running statistics, and the model has none. Leave bn out.")
    rows: list[Row] = []
    outputs = _Outputs(model, wanted=out is not None and not task.by_pixel)
    for which, way in statistics.items():
        if which == "re-estimated":
            _reestimate(model, chosen, task, saved)
        with outputs:
            rows.append(Row("all", which, evaluate_adapted(model, chosen, way, task)))
        rows += [Row(name, which, evaluate_adapted(model, view, way, task)) for name, view in groups.items()]
    if out is not None:
        place = _place(parts, own, part)
        text = (
            _predictions(outputs.last(len(chosen)), chosen, task, saved.description.classes, place)
            if outputs.wanted
            else ""
        )
        about = {"model": what, "dataset": config.dataset, "part": part, "notes": told, "warnings": warnings}
        _write(out, text, about, rows)
    return what, rows


def _choice(bn: str) -> Choice:
    if bn in ("", ADAPT, *TEST_BN_MODES):
        return Choice()
    if own := _OWN.fullmatch(bn):
        return Choice(client=int(own[1]))
    if bn != "averaged":
        others = ", ".join([ADAPT, *TEST_BN_MODES])
        raise ConfigError(f"bn={bn!r} is unknown. Allowed: averaged, own:CLIENT (e.g. own:2), {others}, or no bn.")
    return Choice(averaged=True)


def _config_of_data(saved: SavedModel, data: Mapping[str, Any], bn: str) -> Config:
    """Return the settings of the run's model with those of the new data, and of their BatchNorm statistics.

    Raises:
        ConfigError: a setting does not describe data, or is bad.
    """
    if others := [key for key in data if key in saved.config.to_mapping() and key not in _OF_DATA]:
        raise ConfigError(
            f"{', '.join(others)}: evaluate takes keys that describe the data ({', '.join(_OF_DATA)}); all others are "
            "those of the run, and the new data are not split over clients. Leave them out."
        )
    of_run, taken = saved.config.to_mapping(), saved.description
    shared = {key: of_run[key] for key in (*_OF_THE_MODEL, *_OF_READING) if key in of_run}
    dataset = str(data.get("dataset"))
    if is_own(dataset):
        shared["task"] = taken.task  # targets of a few examples may look like those of another one
    if is_own(dataset) and not taken.classes and taken.task in ("classification", "segmentation"):
        shared["num-classes"] = taken.num_classes
    if dataset.startswith("csv:") and (path := dataset.removeprefix("csv:")):
        columns = table_columns(OwnData(*OwnData.parse(dataset)))
        absent = [key for key in _COLUMNS if shared.get(key) not in columns]
        absent += ["client-column"] if Path(path).is_dir() else []  # each table is a client's
        shared = {key: value for key, value in shared.items() if key not in absent}
    own = {"partition": "iid", "num-clients": 1, **data}
    own |= {"test-bn": bn, "eval-on": f"global{TEST_BN}"} if bn in TEST_BN_MODES else {}
    return Config.make_of_shared(shared, own)[0]


def _data(saved: SavedModel, config: Config, stated: Collection[str]) -> tuple[PartitionedData, list[str]]:
    """Return the new data with the normalisation of the run, and what a reader of the results must know of them.

    Args:
        saved: the model of the run.
        config: the settings of the new data.
        stated: keys by which the user gave the order of the classes, if any.

    Raises:
        ConfigError: the data do not fit the model.
    """
    ran, taken = saved.config, saved.description
    problems = []
    if taken.task != config.learning_task().name:
        problems.append(f"the model is for {taken.task}, the data are for {config.learning_task().name}")
    classes, found = taken.num_classes, config.data_info().num_classes
    if found != classes:
        named = f"class-names={','.join(taken.classes)} names the absent ones" if taken.classes else ""
        problems.append(
            f"the data of the run have {classes} classes, dataset={config.dataset} has {found}. Bring these data to "
            "the classes of the run, in the same order" + (f"; if they lack some, {named}" if named else "")
        )
    features = config.data_info().feature_names
    if features and taken.features and features != taken.features:
        problems.append(
            f"the features of the run are {', '.join(taken.features)}; those of dataset={config.dataset} are "
            f"{', '.join(features)}. Name columns and categories in feature-columns, e.g. age,sex:F|M"
        )
    if problems:
        raise ConfigError("\n".join(f"{problem}." for problem in problems))
    data = partitioned_data(config, 1, taken.shape if len(taken.shape) == 3 else ())
    dataset, names = data.dataset, data.dataset.class_names
    if dataset.test.shape != taken.shape:
        problems.append(
            f"the model takes inputs {taken.shape}, those of dataset={config.dataset} are {dataset.test.shape}: give "
            "data with as many channels or features, and of the same height and width"
        )
    known, given = (
        "" if all(map(str.__eq__, n, map(str, range(len(n))))) else ", ".join(n) for n in (taken.classes, names)
    )
    positive = taken.positive
    notes = [f"the positive class is {positive}"] if positive else []
    if known and given and names != taken.classes:
        problems.append(
            f"the classes of the run are {known}, those of dataset={config.dataset} {given}: name them alike"
        )
    elif given and not known and not stated and dataset.test.by_class:
        numbers = [str(number) for number in range(max(classes, 2))]
        said = "the names in the order of the numbers"
        if set(names) <= {*numbers}:  # some of them are absent here
            said, names = "those of the run", tuple(numbers)
        problems.append(
            f"the classes of the run are the numbers 0 to {numbers[-1]}, those of dataset={config.dataset} are "
            f"named {given}: give {said}, class-names={','.join(names)} say"
        )
    elif bool(given) != bool(known):
        numbered = ", ".join(f"{number} = {name}" for number, name in enumerate(names or taken.classes))
        notes.append(f"classes of the {'data' if given else 'run'} by number: {numbered}")
    if problems:
        raise ConfigError("\n".join(f"{problem}." for problem in problems))
    if ran.standardise == "local":  # each client has its own mean and std, so these data have theirs
        return data, [*notes, _OWN_SCALE]
    return replace(data, dataset=replace(dataset, mean=taken.mean, std=taken.std)), notes


def _place_of(config: Config) -> tuple[str, Path | str]:
    """Return the kind of a config's data and where they are, however the path is spelled."""
    kind, _, path = config.dataset.partition(":")
    return kind, Path(path).resolve() if path and kind != "hf" else path


def _overlap(config: Config, ran: Config) -> str:
    """Return a sentence if the files of a run's data and of others lie one in the other; else ""."""
    (kind, here), (other, there) = _place_of(config), _place_of(ran)
    if kind != other or here == there or not isinstance(here, Path) or not isinstance(there, Path):
        return ""
    if not (here.is_relative_to(there) or there.is_relative_to(here)):
        return ""
    return (
        f"dataset={config.dataset!r} and the data of the run, {ran.dataset!r}, have files in common: training examples "
        f"of the run may be among them. With --dataset {ran.dataset} its test examples alone are used, by group, too."
    )


def _without_held_out(data: PartitionedData, ran: Config, config: Config) -> PartitionedData:
    """Return the data of a run with its held-out clients, whose examples do not count in a test of all."""
    here = {key: getattr(config, key) for key in ("dataset", "data_dir", "device")}
    ran = ran.model_copy(update=here)
    split = partitioned_data(ran, count_clients(ran))
    return replace(data, held_out=split.held_out, held_out_names=split.held_out_names)


def _parts(data: PartitionedData, part: str) -> list[PartitionedData]:
    """Return data whose test examples are those of a part; two for the training and the test examples."""
    held_out = tuple((own, own) for own, _ in data.held_out)
    train = replace(data, dataset=replace(data.dataset, test=data.dataset.train), held_out=held_out)
    return {"train": [train], "test": [data], "all": [train, data]}[part]


def _doubts(parts: Sequence[PartitionedData]) -> list[str]:
    """Return what looks wrong in the values of the inputs of the first part that has such."""
    found = (doubtful_values(one.dataset.test, scaled=bool(one.dataset.mean)) for one in parts)
    return next(filter(None, found), [])


def _views(parts: Sequence[PartitionedData]) -> tuple[Subset | _Joined, dict[str, Subset | _Joined]]:
    """Return the examples of the parts but those of held-out clients, and those of each group by name."""
    groups: dict[str, list[Subset]] = {}
    for one in parts:
        for name, view in replace(one, held_out=()).domain_views().items():
            groups.setdefault(name, []).append(view)
    return _joined([one.test_view() for one in parts]), {name: _joined(views) for name, views in groups.items()}


def _joined(parts: Sequence[Subset]) -> Subset | _Joined:
    return parts[0] if len(parts) == 1 else _Joined(parts)


class _Joined:
    """Several subsets as one, in order."""

    def __init__(self, parts: Sequence[Subset]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def targets(self) -> Tensor:
        return torch.cat([part.targets for part in self.parts])

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return the examples at ascending positions."""
        found, start = [], 0
        for part in self.parts:
            own = positions[(positions >= start) & (positions < start + len(part))] - start
            found += [part.batch(own, generator)] if len(own) else []
            start += len(part)
        inputs, targets = zip(*found, strict=True)
        return torch.cat(inputs), torch.cat(targets)


class _Outputs:
    """The outputs of a model in the last block, on the CPU; kept only if they are wanted."""

    def __init__(self, model: nn.Module, wanted: bool) -> None:
        self.wanted = wanted
        self._model = model
        self._found: list[Tensor] = []

    def __enter__(self) -> None:
        self._found = []
        self._handle = self._model.register_forward_hook(self._note)

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def _note(self, model: nn.Module, inputs: Any, output: Tensor) -> None:
        if self.wanted:
            self._found.append(output.cpu())

    def last(self, count: int) -> Tensor:
        """Return those of the last ``count`` examples, (count, ...); those of a pass for statistics come before."""
        return torch.cat(self._found)[-count:]


def _reestimate(model: nn.Module, data: Subset | _Joined, task: Task, saved: SavedModel) -> None:
    """Give BatchNorm the mean and the (biased) variance of the new inputs under these weights."""
    moments = reestimate_statistics(model, data, batch_size=task.test_batch)
    if not moments:
        raise ConfigError(
            f"bn={ADAPT} re-estimates BN statistics from two or more examples. The data have {len(data)}, and "
            f"model={saved.config.model} with norm={saved.config.norm} needs BatchNorm. Leave bn out."
        )
    load_statistics(model, moments)


class _Place(NamedTuple):
    """Where the examples are in the user's data: the first column of ``predictions.csv``, and its order."""

    column: str
    names: Sequence[int | str]  # of all rows
    numbers: Indices  # the row of each example


def _place(parts: Sequence[PartitionedData], own: OwnRows | None, part: str) -> _Place:
    """Return where the examples of the parts are, but those of held-out clients."""
    sizes = [len(one.dataset.test) for one in parts]
    rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    if own:
        rows = {"train": [own.train], "test": [own.test], "all": [own.train, own.test]}[part]
    apart = [[tests for _, tests in one.held_out] for one in parts]
    kept = [np.delete(row, np.concatenate(held)) if held else row for row, held in zip(rows, apart, strict=True)]
    return _Place(*(own.column, own.names) if own else ("index", range(sum(sizes))), np.concatenate(kept))


def _predictions(
    outputs: Tensor,
    data: Subset | _Joined,
    task: Task,
    classes: Sequence[str],
    place: _Place,
) -> str:
    """Return the text of ``predictions.csv``; a probability names its class, of yes or no the positive one."""
    targets = data.targets.cpu()
    outputs = outputs.double().reshape(len(outputs), -1)
    columns = [classes[k] if k < len(classes) else str(k) for k in range(outputs.shape[1])]
    values = {"target": targets.reshape(len(outputs), -1)}
    if isinstance(task, LabelTask):
        positive = f"-{classes[-1]}" if task.single and classes else ""
        values |= {"prediction": (outputs > 0).long(), f"probability{positive}": outputs.sigmoid()}
    elif isinstance(task, RegressionTask):
        values |= {"prediction": outputs}
    else:
        values |= {"prediction": outputs.argmax(1, keepdim=True), "probability": outputs.softmax(1)}
    names = [
        kind if value.shape[1] == 1 else f"{kind}-{name}"
        for kind, value in values.items()
        for name in columns[: value.shape[1]]
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([place.column, *names])
    rows = list(zip(*(value.tolist() for value in values.values()), strict=True))
    for at in np.argsort(place.numbers).tolist():
        name = place.names[place.numbers[at]]
        writer.writerow([name, *(_shown(value) for part in rows[at] for value in part)])
    return text.getvalue()


def _shown(value: float) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)  # float32, to be read again


def _write(out: Path, predictions: str, about: Mapping[str, Any], rows: Sequence[Row]) -> None:
    found = [{"data": r.data, "statistics": r.statistics, **dict(_numbers(r.result))} for r in rows]
    try:
        out.mkdir(parents=True, exist_ok=True)
        if predictions:
            write_atomically(out / "predictions.csv", predictions)
        write_atomically(out / "metrics.json", json.dumps({**about, "results": found}, indent=2) + "\n")
    except OSError as error:
        raise EngineError(f"out={str(out)!r} cannot be written: {error}.") from error


def _numbers(result: EvalResult) -> Iterator[tuple[str, float | None]]:
    yield "examples", result.num_examples
    for name, value in result.named().items():
        yield name, value if value == value else None  # JSON has no NaN
