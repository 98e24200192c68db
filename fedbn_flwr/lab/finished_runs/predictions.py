"""``predictions.csv``: the target, the prediction and the probabilities of each example, for each of the statistics."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from fedbn_flwr.lab.finished_runs.examples import WhereInData
from fedbn_flwr.training.tasks import LabelTask, RegressionTask, Task

__all__ = ["predictions_csv"]

_STATISTICS = "statistics"
_OWN_NAMES = ("index", "row", "file", _STATISTICS, "target", "prediction", "probability")


def predictions_csv(
    outputs: Mapping[str, Tensor], targets: Tensor, task: Task, classes: Sequence[str], place: WhereInData
) -> str:
    """Return the text of the file; a probability names its class, of yes or no the positive one.

    Args:
        outputs: the model's outputs by BN statistics; if there are several, the column ``statistics`` says which.
        targets: the targets of the examples.
        task: the learning task.
        classes: the names of the classes.
        place: where the examples are.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    order = np.argsort(place.numbers).tolist()
    beside = {_free(name): values for name, values in place.beside.items()}
    several = len(outputs) > 1
    for at, (statistics, of_model) in enumerate(outputs.items()):
        names, rows = _columns(of_model, targets, task, classes)
        if not at:
            writer.writerow([place.column, *beside, *([_STATISTICS] if several else []), *names])
        for example in order:
            row = place.numbers[example]
            where = [place.names[row], *(values[row] for values in beside.values())]
            writer.writerow([*where, *([statistics] if several else []), *map(_shown, rows[example])])
    return text.getvalue()


def _free(name: str) -> str:
    """Return the name of a column of the user's, unlike those of this file."""
    return f"{name}-column" if name in _OWN_NAMES else name


def _columns(
    outputs: Tensor, targets: Tensor, task: Task, classes: Sequence[str]
) -> tuple[list[str], list[tuple[float, ...]]]:
    """Return the names of the columns of target, prediction and probability, and their values for each example."""
    outputs = outputs.double().reshape(len(outputs), -1)
    values = {"target": targets.cpu().reshape(len(outputs), -1)}
    if isinstance(task, LabelTask):
        positive = f"-{classes[-1]}" if task.single and classes else ""
        values |= {"prediction": (outputs > 0).long(), f"probability{positive}": task.probabilities()(outputs)}
    elif isinstance(task, RegressionTask):
        values |= {"prediction": outputs}
    else:
        values |= {"prediction": outputs.argmax(1, keepdim=True), "probability": task.probabilities()(outputs)}
    columns = [classes[k] if k < len(classes) else str(k) for k in range(outputs.shape[1])]
    names = []
    for kind, value in values.items():
        names += [kind] if value.shape[1] == 1 else [f"{kind}-{name}" for name in columns[: value.shape[1]]]
    columns_of_numbers = [column for value in values.values() for column in value.T.tolist()]
    return names, list(zip(*columns_of_numbers, strict=True))


def _shown(value: float) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)  # float32, to be read again
