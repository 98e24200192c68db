"""What was read of the data of a run, before round 1: counts, shapes, value ranges, and what looks wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.errors import DataError, NotResumableError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.data import Samples, is_own, own_sha256, partition_counts, partition_table, shows_colour
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.files import read_json
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData

__all__ = [
    "HELD_OUT_CLIENTS",
    "TRAINING_BY_CLASS",
    "DataReport",
    "classes_without_client",
    "client_names",
    "data_report",
    "doubtful_values",
    "has_other_data",
    "refuse_no_tests",
    "refuse_other_data",
    "sha256_of_data",
]

TRAINING_BY_CLASS = "training examples by class"
"""The key of ``data.json`` with the counts of each client."""
HELD_OUT_CLIENTS = "held-out clients"
"""The key of ``data.json`` with the examples of each client that never trains."""
_SAMPLED = 64  # images on the disk whose values are looked at
_FEW_COLUMNS = 100  # without names
_MOST = 20  # clients, classes and features that the text shows
_LARGE = 1e4  # a number of this size in inputs that are taken as they are


@dataclass(frozen=True)
class DataReport:
    """What was read.

    Attributes:
        figures: numbers of examples by part and client, classes, shape, value ranges: the content of ``data.json``.
        notes: what reading changed or left out.
        warnings: what looks wrong; training goes on.
    """

    figures: dict[str, Any]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    def text(self) -> str:
        """Return the report, several lines; the warnings are not in it."""
        figures, values = self.figures, self.figures["values"]
        parts = ", ".join(f"{number:,} {part}" for part, number in figures["examples"].items() if number)
        task = figures["task"]
        if task == "segmentation":
            task += f" with {figures['outputs']} classes"
        first = f"{figures['dataset']}: {task}, {parts} examples of shape {tuple(figures['shape'])}"
        first += f", values {values['lowest']:g} to {values['highest']:g}"
        lines = [first + (" (of a sample)" if values["sampled"] else "")]
        if counts := figures.get(TRAINING_BY_CLASS):
            table = np.array(list(counts.values()))
            if table.shape[1] <= _MOST and len(table) <= _MOST:
                lines += [TRAINING_BY_CLASS, partition_table(table, tuple(figures["classes"]))]
                if named := [f"client {at} is {name}" for at, name in enumerate(counts) if name != str(at)]:
                    lines.append(", ".join(named))
        for name, held in figures.get(HELD_OUT_CLIENTS, {}).items():
            lines.append(f"held out: {name}, {held['inputs']:,} inputs, {held['test']:,} test examples")
        features = figures.get("features", {})
        for name, values in list(features.items())[:_MOST]:
            missing = f", {values['missing']} missing" if values["missing"] else ""
            lines.append(f"  {name}: {values['lowest']:g} to {values['highest']:g}, mean {values['mean']:g}{missing}")
        if len(features) > _MOST:
            lines.append(f"  and {len(features) - _MOST} more features")
        return "\n".join([*lines, *self.notes])


def data_report(split: PartitionedData, config: Config) -> DataReport:
    """Return the report of a run's data, or of those of one node (a split with one client)."""
    data, info, of_user = split.dataset, config.data_info(), is_own(config.dataset)
    names, inputs = client_names(split), data.train
    values = _values(inputs, np.concatenate(split.train))
    figures: dict[str, Any] = {
        "dataset": config.dataset,
        "task": config.learning_task().name,
        "shape": list(data.train.shape),
        "outputs": data.num_classes,
        "classes": list(data.label_names) if data.train.by_class else list(data.class_names),
        "examples": {
            "training": sum(map(len, split.train)),
            "validation": sum(map(len, split.validation)),
            "test": sum(map(len, split.test)),
        },
        "training examples by client": {name: len(part) for name, part in zip(names, split.train, strict=True)},
        "test examples by client": {name: len(part) for name, part in zip(names, split.test, strict=True)},
        "values": values,
    }
    for name, (train, test) in zip(split.held_out_names, split.held_out, strict=True):
        figures.setdefault(HELD_OUT_CLIENTS, {})[name] = {"inputs": len(train), "test": len(test)}
    warnings = [*info.warnings, *_of_clients(figures)]
    if absent := [name for name in info.group_names if name not in data.group_names]:
        there = ", ".join(data.group_names)
        warnings.append(f"{info.name} also has {', '.join(absent)}, not in data-dir: this run has only {there}")
    left = len(data.test) - sum(map(len, split.test)) - sum(len(test) for _, test in split.held_out)
    if of_user and left:
        warnings.append(f"{left} test examples belong to no client: they count in tests of the global model only")
    if data.train.by_class:
        labels = data.train.labels.cpu().numpy()
        counts = partition_counts(split.train, labels, len(data.label_names))
        figures[TRAINING_BY_CLASS] = {n: row.tolist() for n, row in zip(names, counts, strict=True)}
        if of_user and config.split_name() == "natural":
            warnings += _without_class(names, counts, data.label_names)
    warnings += _of_colour(config, data.train.shape)
    columns = info.feature_names or tuple(f"column {at}" for at in range(data.train.shape[0]))
    few = bool(info.feature_names) or len(columns) <= _FEW_COLUMNS  # not the pixels of flattened images
    if of_user and few and len(data.train.shape) == 1 and inputs.in_memory:
        figures["features"] = _features(inputs, split, columns)
        warnings += _of_features(figures["features"], figures["examples"]["training"])
    warnings += _of_values(values, data.train.as_bytes)
    return DataReport(figures, info.notes, tuple(warnings))


def classes_without_client(split: PartitionedData, config: Config) -> list[str]:
    """Return a line if the split leaves out classes that the data have."""
    train = split.dataset.train
    if not train.by_class:
        return []
    labels, names = train.labels.cpu().numpy(), split.dataset.label_names
    used = np.concatenate([*split.train, *split.validation])  # held-out clients train nothing
    total, held = (np.bincount(some, minlength=len(names)) for some in (labels, labels[used]))
    lacking = np.flatnonzero((total > 0) & (held == 0))
    if not len(lacking):
        return []
    shown = ", ".join(names[number] for number in lacking[:5]) + (", ..." if len(lacking) > 5 else "")
    line = (
        f"{len(lacking)} of {len(names)} classes have no client ({shown}): their {total[lacking].sum()} training "
        "examples are not used, and no model learns them."
    )
    if config.split_name() == "classes":
        needed = -(-len(names) // (len(split.train) + len(split.held_out)))
        line += f" Set classes-per-client to {needed} or more, or use more clients."
    return [line]


def sha256_of_data(config: Config) -> str | None:
    """Return the SHA-256 of own data; None on a machine that has them from another one, without the files."""
    try:
        return own_sha256(config.own_data())
    except DataError:
        return None


def has_other_data(run: Path, config: Config) -> bool:
    """Return whether own data are other examples, or divided in another way, than those of the run in a folder.

    False where the folder does not say what they were.
    """
    if not is_own(config.dataset) or config.data_on_nodes():
        return False
    before = read_json(run / "data.json").get("sha256")
    now = sha256_of_data(config) if before else None
    return now is not None and now != before


def refuse_other_data(run: Path, config: Config) -> None:
    """Raise NotResumableError if a run would go on with other data: test examples may have been trained on."""
    if has_other_data(run, config):
        raise NotResumableError(
            f"dataset={config.dataset!r} has changed since the run in {run} began: other examples, another order or "
            "another division into training and test examples. Restore the data, or start a new run in another folder."
        )


def refuse_no_tests(split: PartitionedData, config: Config) -> None:
    """Raise DataError if own data have no test examples: the run would end without results."""
    if not is_own(config.dataset) or len(split.dataset.test):
        return
    if config.by_function():
        raise DataError(
            f"dataset={config.dataset!r}: the function returns no example for the part 'test' of any site, and a run "
            "without them has no results."
        )
    raise DataError(
        f"dataset={config.dataset!r}: 0 of the {len(split.dataset.train)} examples are test examples (test-share="
        f"{config.test_share:g}), and a run without them has no results. Use a larger test-share, or data that say "
        "which are test examples."
    )


def client_names(split: PartitionedData) -> list[str]:
    """Return the name of each client: its group, if it has one group of its own, else its number."""
    groups, known = split.dataset.train.groups, split.dataset.group_names
    numbers = [str(at) for at in range(len(split.train))]
    if groups is None:
        return numbers
    names = []
    for number, part in zip(numbers, split.train, strict=True):
        of_client = torch.unique(groups[torch.as_tensor(part).to(groups.device)]).tolist()
        names.append(known[of_client[0]] if len(of_client) == 1 else number)
    return names if len(set(names)) == len(names) else numbers


def doubtful_values(samples: Samples, scaled: bool) -> list[str]:
    """Return what looks wrong in the values of inputs, one line each; ``scaled``: the model takes them with mean 0."""
    return [*_of_values(_values(samples), samples.as_bytes or scaled)] if len(samples) else []


def _values(samples: Any, whole: Indices | None = None) -> dict[str, Any]:
    """Return the range of the values of some inputs, None = all; of images on the disk that of a sample."""
    sampled = not samples.in_memory
    indices = torch.as_tensor(np.arange(len(samples)) if whole is None else whole)
    inputs: Tensor
    if sampled:
        inputs = samples.take(indices[:_SAMPLED])[0]
    else:
        inputs = samples.inputs if whole is None else samples.inputs[indices.to(samples.inputs.device)]
    numbers = inputs[~inputs.isnan()] if inputs.is_floating_point() else inputs
    low, high = (float(bound) for bound in torch.aminmax(numbers)) if numbers.numel() else (0.0, 0.0)
    return {"lowest": low, "highest": high, "missing": inputs.numel() - numbers.numel(), "sampled": sampled}


def _features(samples: Samples, split: PartitionedData, names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    rows = samples.inputs[torch.as_tensor(np.concatenate(split.train)).to(samples.device)].double().cpu().numpy()
    features = {}
    for name, column in zip(names, rows.T, strict=True):
        values = column[~np.isnan(column)]
        low, high, mean = (float(f(values)) if len(values) else float("nan") for f in (np.min, np.max, np.mean))
        features[name] = {"lowest": low, "highest": high, "mean": mean, "missing": len(column) - len(values)}
    return features


def _of_clients(figures: dict[str, Any]) -> Iterator[str]:
    rows = len(figures["shape"]) == 1
    for name, count in figures["training examples by client"].items():
        if not count:
            yield f"client {name} has no training examples"
        elif count == 1:
            alone = " cannot compute statistics from it alone" if rows else "'s statistics are those of one example"
            yield f"client {name} has 1 training example: BatchNorm{alone}"
    without = [name for name, count in figures["test examples by client"].items() if not count]
    if without:
        yield f"no test examples: client {_listed(without)}; their own tests are left out of every mean"


def _without_class(names: list[str], counts: Indices, classes: tuple[str, ...]) -> Iterator[str]:
    for at in range(counts.shape[1]):
        without = [name for name, row in zip(names, counts, strict=True) if not row[at]]
        if without and len(without) < len(names):
            yield f"no training examples of class {classes[at]}: client {_listed(without)}"


def _of_colour(config: Config, shape: tuple[int, ...]) -> Iterator[str]:
    """Yield what a model that takes grey images loses of images in colour."""
    info = config.data_info()
    if info.channels != 3 or len(shape) != 3 or shape[0] != 1:
        return
    if is_own(config.dataset) and not shows_colour(config.own_data()):
        return
    smaller = f", and they are made smaller, from {info.size} to {shape[1]} pixels" if info.size > shape[1] else ""
    yield (
        f"model={config.model} takes grey images: the colours of dataset={config.dataset} are lost{smaller}. Use "
        "model=lenet, say, or model=torchvision:resnet18"
    )


def _of_features(features: dict[str, dict[str, float]], count: int) -> Iterator[str]:
    constant = [name for name, values in features.items() if values["lowest"] == values["highest"]]
    if constant:
        yield f"the same value in all training examples: {_listed(constant)}; leave it out"
    if mostly := [name for name, values in features.items() if 2 * values["missing"] > count]:
        yield f"missing in more than half of the training examples: {_listed(mostly)}"


def _of_values(values: dict[str, Any], as_bytes: bool) -> Iterator[str]:
    low, high = values["lowest"], values["highest"]
    if as_bytes and high <= 1:
        yield f"pixels are {low:g} to {high:g}, and bytes are expected to be 0 to 255: multiply them by 255"
    elif low == high:
        yield f"all inputs are {low:g}"
    if not as_bytes and max(abs(low), abs(high)) > _LARGE:
        yield f"inputs reach {max(abs(low), abs(high)):g} and are taken as they are: scale them in your data or model"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f", and {len(names) - 8} more" if len(names) > 8 else "")
