"""The config's description of own data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedbn_flwr.errors import ConfigError, DataError, unknown_name
from fedbn_flwr.lab.data.datasets import DATASETS, DatasetInfo
from fedbn_flwr.lab.own_code import is_function, own_module
from fedbn_flwr.training.own_task import OwnTask
from fedbn_flwr.training.tasks import TASKS, Task

KINDS = {
    "folder": (
        "folder:PATH, image files in class/file, client/class/file or"
        " client/{train,test}/class/file"
    ),
}
"""Kinds of own data in files: the prefix of ``dataset``, and its form for messages."""

FUNCTION = "function"
"""The kind of ``dataset=module:function``, a user's function of a site."""
FUNCTION_FORM = (
    "<module>:<function>, your own function of (site, part) that returns a torch"
    " Dataset"
)


def is_own(dataset: str) -> bool:
    """Return whether the config's ``dataset`` names own data: a folder or a function."""
    return ":" in dataset and registered(dataset) is None


def registered(dataset: str) -> DatasetInfo | None:
    """Return the entry of a data set in the registry or in a module (module:NAME)."""
    found = DATASETS.get(dataset)
    if is_function(dataset, KINDS):
        # Without the module, the name means a function, whose reader reports the fault.
        with suppress(ConfigError):
            module = own_module("dataset", dataset, KINDS)
            found = getattr(module, dataset.partition(":")[2], None)
    return found if isinstance(found, DatasetInfo) else None


@dataclass(frozen=True, slots=True)
class OwnData:
    """Own data and how to read them.

    Attributes:
        kind: a key of ``KINDS``, or ``FUNCTION``.
        path: an absolute path (``FUNCTION``: module:function); "" if only the nodes
            have the data.
        task: name of the task; with "", the form of the targets determines the task.
        num_classes: number of classes; with 0, the number of classes in the data.
        image_size: height and width of the images; with 0, their median height.
        test_share: share of the examples that are test examples, if the data have no
            split; 1 makes all of them tests.
        sites: ``FUNCTION``: the sites to load, by number or by a node's
            ``data-path``.
        of_node: ``FUNCTION``: whether this is the one site of a node.
        known_classes: names of the classes of a finished model, whose ``task`` and
            ``num_classes`` are set as well. The data may then lack targets. With (),
            all data need targets.

    The fields are the config keys of these names.
    """

    kind: str
    path: str
    task: str = ""
    num_classes: int = 0
    image_size: int = 0
    test_share: float = 0.2
    sites: tuple[int | str, ...] = ()
    of_node: bool = False
    known_classes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The config's ``dataset``."""
        return self.path if self.kind == FUNCTION else f"{self.kind}:{self.path}"

    def problem(self, text: str) -> DataError:
        """Return the error about these data with the given text."""
        return DataError(f"dataset={self.name!r}: {text}")

    @staticmethod
    def parse(dataset: str) -> tuple[str, str]:
        """Return kind and path of a config's ``dataset``.

        Raises:
            ConfigError: the kind is unknown, or the path is relative.
        """
        if is_function(dataset, KINDS):
            return FUNCTION, dataset
        # Otherwise the name is a kind, a colon and a path. On Windows, the path has a
        # further colon.
        kind, _, path = dataset.partition(":")
        path = os.path.expanduser(path)
        if kind not in KINDS:
            raise unknown_name("kind of own data", kind, KINDS)
        if path and not Path(path).is_absolute():
            raise ConfigError(
                f"dataset={dataset!r} is relative, but nodes run in other folders."
                " Write the absolute path (seen from the folder of this process:"
                f" '{kind}:{Path(path).absolute()}')."
            )
        return kind, path

    def existing(self) -> Path:
        """Return the path of the folder, if it exists.

        Raises:
            DataError: the folder does not exist.
        """
        path = Path(self.path)
        if self.path and path.is_dir():
            return path
        raise self.problem("there is no such folder.")


def shown(names: Sequence[str], most: int = 8) -> str:
    """Return the first ``most`` names as one text, for messages."""
    listed = list(names[:most])
    if len(names) > most:
        listed.append("...")
    return ", ".join(listed) or "nothing"


def own_task(name: str) -> OwnTask:
    """Return the ``OwnTask`` that a name ``module:NAME`` means.

    Raises:
        ConfigError: the module cannot be imported, or it has no such task.
    """
    found = getattr(own_module("task", name), name.partition(":")[2], None)
    if not isinstance(found, OwnTask):
        raise ConfigError(
            f"task={name!r}: the module has no OwnTask of this name. Write"
            " NAME = fedbn_flwr.training.OwnTask(...) in it."
        )
    return found


def chosen_task(request: OwnData, allowed: Sequence[str]) -> Task:
    """Return the config's task, or else the first of the allowed tasks.

    Raises:
        ConfigError: the targets are not for this task.
    """
    name = request.task or allowed[0]
    if is_function(name):
        if request.kind == FUNCTION:
            return own_task(name)
        raise request.problem(
            f"task={name} is a task of your own. Its data come from a function:"
            " dataset=module:function."
        )
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    if name not in allowed:
        raise ConfigError(
            f"task={name} does not fit the targets of dataset={request.name!r}: these"
            f" targets are for {' or '.join(allowed)}."
        )
    return TASKS[name]
