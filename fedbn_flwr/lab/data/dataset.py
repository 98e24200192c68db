"""A training and a test set, with the names of their classes and groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.samples import Samples

__all__ = ["Dataset"]


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """A training and a test set of one kind of examples.

    Attributes:
        name: name in the registry of data sets, or the kind and path of own data.
        train: training samples.
        test: test samples.
        num_classes: targets are 0..num_classes - 1; for other tasks the number of the model's outputs.
        mean: mean of the training pixels per channel, pixels scaled to [0, 1]; () if inputs are taken as they are.
        std: standard deviation, in the same way.
        group_names: names of the groups 0, 1, ... of training and test samples; () if there are no groups.
        class_names: names of the classes (labels, target columns) 0, 1, ...; () if they have no names.
    """

    name: str
    train: Samples
    test: Samples
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    group_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise DataError unless both sets have groups with names, or neither has groups."""
        for what, samples in (("training", self.train), ("test", self.test)):
            if (samples.groups is None) != (not self.group_names):
                raise DataError(
                    f"data set {self.name!r}: {len(self.group_names)} names of groups, but the {what} samples have "
                    f"{'no' if samples.groups is None else 'some'} groups. Give both or neither."
                )
            if samples.groups is not None and len(samples):
                low, high = (int(bound) for bound in torch.aminmax(samples.groups))
                if low < 0 or high >= len(self.group_names):
                    raise DataError(
                        f"data set {self.name!r}: groups of the {what} samples run from {low} to {high}; "
                        f"the {len(self.group_names)} names allow 0 to {len(self.group_names) - 1}."
                    )

    @property
    def label_names(self) -> tuple[str, ...]:
        """A name for each class of a label, its number where it has none; one output may stand for two classes."""
        count = max(self.num_classes, int(self.train.labels.max()) + 1 if len(self.train) else 0)
        return tuple(self.class_names[at] if at < len(self.class_names) else str(at) for at in range(count))
