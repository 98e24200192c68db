"""What a reader finds in own data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedbn_flwr.training.tasks import Task

__all__ = ["Inputs", "Records", "Targets"]


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of N examples.

    Attributes:
        values: paths of N image files; or uint8 images (N, C, H, W) or float32 (N, ...), NaN = missing.
        size: (height, width) of the images as stored, or ().
        feature_names: names of the features of rows, or ().
        columns: (column, category) of each feature of a table, the category "" for numbers; or ().
        notes: what a user must know: columns made of text, values filled in, and so on.
        warnings: what looks wrong.
    """

    values: Tensor | Sequence[Path]
    size: tuple[int, ...] = ()
    feature_names: tuple[str, ...] = ()
    columns: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example in memory; () for image files."""
        return tuple(self.values.shape[1:]) if isinstance(self.values, Tensor) else ()

    @property
    def channels(self) -> int:
        """Channels of the images, 3 for image files; 0 for other examples."""
        if not isinstance(self.values, Tensor):
            return 3
        return self.shape[0] if self.values.dtype == torch.uint8 else 0


@dataclass(frozen=True, eq=False)
class Targets:
    """The targets of N examples, and what follows from them.

    Attributes:
        values: int64 (N,), float32 (N,) or (N, K), or uint8 (N, H, W); paths of N files with classes of pixels.
        task: the learning task.
        num_classes: outputs of the model: classes, labels or target columns.
        class_names: their names, () = numbers.
        notes: as for ``Inputs``.
        warnings: as for ``Inputs``.
    """

    values: Tensor | Sequence[Path]
    task: Task
    num_classes: int
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Records:
    """Own data as a reader returns them, N examples.

    Attributes:
        inputs: the inputs.
        targets: the targets.
        clients: client of each example, (N,), and ``client_names``; None if the data have no clients.
        units: unit (patient) of each example, (N,), or None, and ``unit_names``.
        tests: whether each example is a test example, bool (N,); None if the data do not say.
        notes: what is left out, such as files, columns and arrays.
    """

    inputs: Inputs
    targets: Targets
    clients: npt.NDArray[np.int64] | None = None
    client_names: tuple[str, ...] = ()
    units: npt.NDArray[np.int64] | None = None
    unit_names: tuple[str, ...] = ()
    tests: npt.NDArray[np.bool_] | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.targets.values)
