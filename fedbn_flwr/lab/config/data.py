"""The data of a run by its config.

These are the data set, the shape of an example, the task and the split.
"""

from __future__ import annotations

import math
import unicodedata
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
    registered,
)
from fedbn_flwr.lab.models import input_shape
from fedbn_flwr.training.own_task import OwnTask
from fedbn_flwr.training.tasks import TASKS, Task

# how many numbers the inputs of a test batch may have: as many as 500 images of 64x64
# pixels in colour
_TEST_VALUES = 500 * 3 * 64 * 64


def data_of(config: Fields) -> RunData:
    """Return the data of a run by its config."""
    return RunData(config)


@dataclass(frozen=True)
class RunData:
    """The data of a run.

    This class caches nothing, because the reader of own data caches them until their
    files change.
    """

    config: Fields

    @property
    def is_own(self) -> bool:
        """Whether the data are the user's own."""
        return is_own(self.config.dataset)

    @property
    def by_function(self) -> bool:
        """Whether a user's function gives the data; a node calls it for its site."""
        return self.is_own and OwnData.parse(self.config.dataset)[0] == FUNCTION

    @property
    def on_nodes(self) -> bool:
        """Whether only the nodes have the data. The path in ``dataset`` is then empty."""
        return self.is_own and self.config.dataset.endswith(":")

    @property
    def own(self) -> OwnData:
        """The settings of own data in the config, in the form for their readers."""
        config = self.config
        kind, path = OwnData.parse(config.dataset)
        sites: tuple[int, ...] = ()
        if kind == FUNCTION and config.num_clients:
            # The function is also called for each held-out client. held-out-clients is
            # the name of one, their number, or a list of their names.
            held_out = unicodedata.normalize("NFC", config.held_out_clients).strip()
            if config.partition in ("", "natural") and _is_site(held_out, path):
                count = 1
            elif held_out.isdecimal():
                count = int(held_out)
            else:
                count = len(listed(held_out))
            sites = tuple(range(config.num_clients + count))
        options = config.model_dump(include={*OwnData.__dataclass_fields__})
        return OwnData(kind, path, sites=sites, **options)

    @property
    def info(self) -> DatasetInfo:
        """The description of the data. This reads own data.

        Raises:
            ConfigError: the data set is unknown, or keys do not fit own data.
            DataError: own data cannot be used.
        """
        name = self.config.dataset
        if self.is_own:
            # Import here, because own_info imports the readers of arrays and images,
            # and only runs with own data need them.
            from fedbn_flwr.lab.data import own_info

            return own_info(self.own)
        found = registered(name)
        if found is None:
            raise unknown_name("dataset", name, DATASETS)
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the model's input, such as (C, H, W) or (features,).

        Raises:
            ConfigError: the model is unknown.
        """
        info, asked = self.info, self.config.image_size
        if info.input_shape:
            return info.input_shape
        # The model may need another size or number of channels than the data have.
        channels, height = input_shape(
            self.config.model, info.channels, asked or info.size, asked=bool(asked)
        )
        return channels, height, height

    @property
    def num_outputs(self) -> int:
        """The number of the model's outputs."""
        in_data = self.info.num_classes
        if self.is_own:
            return in_data
        return self.task.outputs(self.config.num_classes or in_data)

    @property
    def split_name(self) -> str:
        """The name of the split, from ``partition`` or the default for the data."""
        if self.config.partition or not self.is_own:
            return self.config.partition or "classes"
        return "natural" if self.info.grouped else "iid"

    @property
    def held_out(self) -> str:
        """``held-out-clients``, or "" if it is 0 and no client has the name 0."""
        text = self.config.held_out_clients
        if text.strip() != "0":
            return text
        is_name = self.split_name == "natural" and "0" in self.info.client_names
        return text if is_name else ""

    @property
    def plain_task(self) -> Task:
        """The learning task with its own metrics."""
        of_data = self.info.task
        if self.config.task in ("", of_data.name) or isinstance(of_data, OwnTask):
            return of_data
        return TASKS[self.config.task]

    @property
    def task(self) -> Task:
        """The learning task with its loss, its metrics, and the counted targets."""
        return measuring(self.plain_task, self.config.metrics)

    @property
    def test_task(self) -> Task:
        """The learning task with the number of examples in a batch of a test."""
        return in_test_batches(self.task, self.shape, self.config.batch_size)

    @property
    def augmentation(self) -> Augment | None:
        """The augmentation, or None without one.

        Raises:
            ConfigError: an entry of ``augment`` cannot be read.
        """
        if not self.config.augment.strip():
            return None
        return Augment.parse(self.config.augment)


def _is_site(text: str, dataset: str) -> bool:
    """Return whether a text is the name of a site of a function's data."""
    if not text:
        return False
    # Import here, because the module imports the readers of own data.
    from fedbn_flwr.lab.data.forms.function import names_given

    return text in (names_given(dataset) or ())


def measuring(task: Task, metrics: str) -> Task:
    """Return the task with the ``metrics`` of a config."""
    names = split(metrics)
    if not names:
        return task
    # Every test reports the loss anyway. If the run is judged by the loss, measure only
    # the other metrics in addition.
    further = names[1:] if names[0] == "loss" else names
    return task.measuring(further).scored_by(names[0])


def in_test_batches(task: Task, shape: tuple[int, ...], batch_size: int) -> Task:
    """Return the task with the number of examples in a batch of a test.

    Larger examples get smaller test batches, to limit the memory. But a test batch may
    have as many examples as a training batch, because training needs more memory than a
    test.
    """
    if isinstance(task, OwnTask):
        return task
    fits = _TEST_VALUES // math.prod(shape)
    examples = max(batch_size, fits, 1)
    return replace(task, plain_test_batch=min(task.test_batch, examples))
