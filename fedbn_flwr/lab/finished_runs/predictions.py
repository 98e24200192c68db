"""``predictions.csv``: the target, the prediction and the probabilities of each example."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbn_flwr.lab.finished_runs.examples import WhereInData
from fedbn_flwr.training.tasks import LabelTask, RegressionTask, Task

__all__ = ["LastOutputs", "predictions_csv"]


class LastOutputs:
    """The outputs of a model in the last block, on the CPU; kept only if they are wanted."""

    def __init__(self, model: nn.Module, wanted: bool) -> None:
        self.wanted = wanted
        self._model = model
        self._outputs: list[Tensor] = []

    def __enter__(self) -> None:
        self._outputs = []
        self._handle = self._model.register_forward_hook(self._note)

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def _note(self, model: nn.Module, inputs: Any, output: Tensor) -> None:
        if self.wanted:
            self._outputs.append(output.cpu())

    def last(self, count: int) -> Tensor:
        """Return those of the last ``count`` examples, (count, ...); those of a pass for statistics come before."""
        return torch.cat(self._outputs)[-count:]


def predictions_csv(outputs: Tensor, targets: Tensor, task: Task, classes: Sequence[str], place: WhereInData) -> str:
    """Return the text of the file; a probability names its class, of yes or no the positive one."""
    outputs = outputs.double().reshape(len(outputs), -1)
    values = {"target": targets.cpu().reshape(len(outputs), -1)}
    if isinstance(task, LabelTask):
        positive = f"-{classes[-1]}" if task.single and classes else ""
        values |= {"prediction": (outputs > 0).long(), f"probability{positive}": outputs.sigmoid()}
    elif isinstance(task, RegressionTask):
        values |= {"prediction": outputs}
    else:
        values |= {"prediction": outputs.argmax(1, keepdim=True), "probability": outputs.softmax(1)}
    columns = [classes[k] if k < len(classes) else str(k) for k in range(outputs.shape[1])]
    names = []
    for kind, value in values.items():
        names += [kind] if value.shape[1] == 1 else [f"{kind}-{name}" for name in columns[: value.shape[1]]]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([place.column, *names])
    columns_of_numbers = [column for value in values.values() for column in value.T.tolist()]
    rows = list(zip(*columns_of_numbers, strict=True))
    for at in np.argsort(place.numbers).tolist():
        writer.writerow([place.names[place.numbers[at]], *map(_shown, rows[at])])
    return text.getvalue()


def _shown(value: float) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)  # float32, to be read again
