"""A training and a test set, with the names of their classes and groups; lists of such
names in one text.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass

from fedbn_flwr.lab.data.samples import Samples

__all__ = ["Dataset", "listed"]


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """A training and a test set of one kind of examples.

    Attributes:
        name: name in the registry of data sets, or the kind and path of own data.
        train: training samples.
        test: test samples.
        num_classes: targets are 0..num_classes - 1; for other tasks the number of the
            model's outputs.
        mean: mean of the training pixels per channel, pixels scaled to [0, 1]; () if
            inputs are taken as they are.
        std: standard deviation, in the same way.
        group_names: names of the groups 0, 1, ... of training and test samples; () if
            there are no groups.
        class_names: names of the classes (labels, target columns) 0, 1, ...; () if they
            have no names.
    """

    name: str
    train: Samples
    test: Samples
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    group_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """A name for each class of a label, its number where it has none."""
        # Labels may have more classes than the model has outputs: one output stands for
        # two classes.
        count = self.num_classes
        if len(self.train):
            count = max(count, int(self.train.labels.max()) + 1)
        known = self.class_names[:count]
        return known + tuple(str(at) for at in range(len(known), count))


def listed(text: str) -> list[str]:
    """Return the entries of a comma list, stripped, without empty ones.

    Args:
        text: ``north,"Paris, Sud"``, say: one with a comma stands in quotes, as in CSV.
    """
    rows = csv.reader([text.strip()], skipinitialspace=True)
    return [entry.strip() for entry in next(rows, []) if entry.strip()]
