"""What the config says of a run's data.

The data set, the shape of an example, the task, the split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fedbn_flwr.errors import unknown_name
from fedbn_flwr.lab.config.fields import Fields
from fedbn_flwr.lab.config.values import listed, split
from fedbn_flwr.lab.data import (
    DATASETS,
    FUNCTION,
    Augment,
    DatasetInfo,
    OwnData,
    is_own,
)
from fedbn_flwr.lab.models import input_shape
from fedbn_flwr.training.tasks import TASKS, Task

__all__ = ["RunData", "data_of"]

# numbers in the inputs of a test batch: 500 images in colour of 64 pixels
_TEST_VALUES = 500 * 3 * 64 * 64


def data_of(config: Fields) -> RunData:
    """Return what the config says of the data."""
    return RunData(config)


@dataclass(frozen=True)
class RunData:
    """The data of a run.

    Own data are read for it, once: their reader keeps what it has read until the files
    change. So nothing is kept here.
    """

    config: Fields

    @property
    def is_own(self) -> bool:
        """Whether the data are the user's own."""
        return is_own(self.config.dataset)

    @property
    def by_function(self) -> bool:
        """Whether a user's function gives them: a node asks it for its own site alone."""
        return self.is_own and OwnData.parse(self.config.dataset)[0] == FUNCTION

    @property
    def on_nodes(self) -> bool:
        """Whether only the nodes have the data: own data without a path."""
        return self.is_own and self.config.dataset.endswith(":")

    @property
    def own(self) -> OwnData:
        """What the config says of own data."""
        config = self.config
        kind, path = OwnData.parse(config.dataset)
        sites: tuple[int, ...] = ()
        if kind == FUNCTION and config.num_clients:
            # A held-out client is one more site: the last ones, or by name.
            held_out = config.held_out_clients.strip()
            if held_out.isdecimal():
                count = int(held_out)
            else:
                count = len(listed(held_out))
            sites = tuple(range(config.num_clients + count))
        options = config.model_dump(include={*OwnData.__dataclass_fields__})
        return OwnData(kind, path, sites=sites, **options)

    @property
    def info(self) -> DatasetInfo:
        """The description of the data; own data are read first.

        Raises:
            ConfigError: the data set is unknown, or keys do not fit own data.
            DataError: own data cannot be used.
        """
        name = self.config.dataset
        if self.is_own:
            # It imports the readers of arrays and images.
            from fedbn_flwr.lab.data import own_info

            return own_info(self.own)
        if name not in DATASETS:
            raise unknown_name("dataset", name, DATASETS)
        return DATASETS[name]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the model's input: (C, H, W) of images, or (features,), ...

        Raises:
            ConfigError: the model is unknown.
        """
        info, asked = self.info, self.config.image_size
        if info.input_shape:
            return info.input_shape
        # The model may need other images than those of the data.
        channels, height = input_shape(
            self.config.model, info.channels, asked or info.size, asked=bool(asked)
        )
        return channels, height, info.aspect * height

    @property
    def num_outputs(self) -> int:
        """The number of the model's outputs."""
        in_data = self.info.num_classes
        if self.is_own:
            return in_data
        return self.task.outputs(self.config.num_classes or in_data)

    @property
    def split_name(self) -> str:
        """The name of the split: ``partition``, or its default for the data."""
        if self.config.partition or not self.is_own:
            return self.config.partition or "classes"
        return "natural" if self.info.grouped else "iid"

    @property
    def plain_task(self) -> Task:
        """The learning task with its own metrics."""
        of_data = self.info.task
        if self.config.task in ("", of_data.name):
            return of_data
        return TASKS[self.config.task]

    @property
    def task(self) -> Task:
        """The learning task: the loss, the metrics, and which targets count."""
        task, names = self.plain_task, split(self.config.metrics)
        if not names:
            return task
        # Each test has a loss; a run may be judged by it.
        further = names[1:] if names[0] == "loss" else names
        return task.measuring(further).scored_by(names[0])

    @property
    def test_task(self) -> Task:
        """The learning task with the examples per batch of its tests.

        An example is held in memory in many forms, so their number falls with its size.
        A batch of the training fits into the memory, and needs more of it.
        """
        task = self.task
        fits = _TEST_VALUES // math.prod(self.shape)
        examples = max(self.config.batch_size, fits, 1)
        return replace(task, plain_test_batch=min(task.test_batch, examples))

    @property
    def augmentation(self) -> Augment | None:
        """The augmentation; None without one.

        Raises:
            ConfigError: an entry of ``augment`` cannot be read.
        """
        if not self.config.augment.strip():
            return None
        return Augment.parse(self.config.augment)
