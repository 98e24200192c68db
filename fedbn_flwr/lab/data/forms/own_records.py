"""Own data in the form that every reader of files returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedbn_flwr.lab.data.forms.request import OwnData
from fedbn_flwr.lab.data.samples import UNKNOWN
from fedbn_flwr.training.tasks import TASKS, Task


@dataclass(frozen=True, eq=False, kw_only=True)
class Records:
    """N examples of own data, in the form that every reader of files returns.

    Attributes:
        inputs: paths of N image files; or uint8 images (N, C, H, W) or float32 (N,
            ...).
        targets: int64 (N,), float32 (N,) or (N, K), or uint8 (N, H, W).
        task: the learning task.
        num_classes: outputs of the model: classes, labels or target columns.
        class_names: their names; with (), the classes are numbers.
        sizes: width and height in pixels of the image files, or of some if there are
            many.
        clients: client of each example, (N,), and ``client_names``; None if the data
            have no clients.
        units: unit (patient) of each example, (N,), or None, and ``unit_names``.
        tests: whether each example is a test example, bool (N,); None if the data have
            no split.
    """

    inputs: Tensor | Sequence[Path]
    targets: Tensor
    task: Task
    num_classes: int
    class_names: tuple[str, ...] = ()
    sizes: Sequence[tuple[int, int]] = ()
    clients: npt.NDArray[np.int64] | None = None
    client_names: tuple[str, ...] = ()
    units: npt.NDArray[np.int64] | None = None
    unit_names: tuple[str, ...] = ()
    tests: npt.NDArray[np.bool_] | None = None

    @classmethod
    def unlabelled(
        cls, request: OwnData, inputs: Tensor | Sequence[Path], **given: Any
    ) -> Records:
        """Return the records of examples without targets.

        Their class is ``UNKNOWN``, and the task is the task of the request.
        """
        targets = torch.full((len(inputs),), UNKNOWN)
        task, num_classes = TASKS[request.task], request.num_classes
        return cls(
            inputs=inputs, targets=targets, task=task, num_classes=num_classes, **given
        )

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.targets)
