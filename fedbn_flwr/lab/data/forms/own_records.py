"""Own image files in the form that their reader returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedbn_flwr.lab.data.forms.request import OwnData
from fedbn_flwr.lab.data.samples import UNKNOWN
from fedbn_flwr.training.tasks import TASKS, Task


@dataclass(frozen=True, eq=False, kw_only=True)
class Records:
    """N image files of the user.

    Attributes:
        paths: the files.
        targets: class of each image, int64 (N,).
        task: the learning task.
        num_classes: outputs of the model.
        class_names: names of the classes; with (), the classes are numbers.
        sizes: width and height in pixels of the image files, or of some if there are
            many.
        clients: client of each example, (N,), and ``client_names``; None if the data
            have no clients.
        tests: whether each example is a test example, bool (N,); None if the data have
            no split.
    """

    paths: Sequence[Path]
    targets: Tensor
    task: Task
    num_classes: int
    class_names: tuple[str, ...] = ()
    sizes: Sequence[tuple[int, int]] = ()
    clients: npt.NDArray[np.int64] | None = None
    client_names: tuple[str, ...] = ()
    tests: npt.NDArray[np.bool_] | None = None

    @classmethod
    def unlabelled(
        cls,
        request: OwnData,
        paths: Sequence[Path],
        sizes: Sequence[tuple[int, int]],
    ) -> Records:
        """Return the records of images without classes.

        Their class is ``UNKNOWN``, and the task is the task of the request.
        """
        targets = torch.full((len(paths),), UNKNOWN)
        task, num_classes = TASKS[request.task], request.num_classes
        return cls(
            paths=paths,
            targets=targets,
            task=task,
            num_classes=num_classes,
            sizes=sizes,
        )

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.targets)
