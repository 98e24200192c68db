"""What a config says of own data, and how its readers name and number what they find."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedbn_flwr.errors import ConfigError, DataError, unknown_name
from fedbn_flwr.lab.data.names import listed, one_form
from fedbn_flwr.lab.own_code import is_function
from fedbn_flwr.training.tasks import TASKS, Task

__all__ = [
    "FUNCTION",
    "FUNCTION_FORM",
    "KINDS",
    "MISSING_VALUES",
    "OwnData",
    "is_number",
    "is_own",
    "left_out",
    "oddly_written",
]

_MANY = 20  # a number of classes from which gaps are no accident
_NUMBER = re.compile(r"[-+]?(\d{1,3}([., '\xa0]\d{3})+|\d+)([.,]\d+)?\s*%?")

MISSING_VALUES = "?,NA,N/A,#N/A,NaN,NULL,None"
"""The default of ``missing-values``."""

KINDS = {
    "folder": "folder:PATH, image files in class/file, client/class/file or client/{train,test}/class/file",
    "npz": "npz:PATH, arrays x, y and, where there are any, client, group and split",
    "csv": "csv:PATH, a table (CSV or parquet), or a folder with a table for each client",
    "hf": "hf:NAME, a data set of the Hugging Face hub, through flwr-datasets",
}
"""Kinds of own data that are read by their format: the prefix of ``dataset`` and its form."""

FUNCTION = "function"
"""The kind of ``dataset=module:function``, a user's function that returns the data of a site."""
FUNCTION_FORM = "<module>:<function>, your own function of (site, part) that returns a torch Dataset"


def is_own(dataset: str) -> bool:
    """Return whether the config's ``dataset`` names own data: it has a prefix."""
    return ":" in dataset


@dataclass(frozen=True, slots=True)
class OwnData:
    """Own data and how to read it; the fields are the config keys of these names.

    Attributes:
        kind: a key of ``KINDS``, or ``FUNCTION``.
        path: an absolute path (``hf``: a name, ``FUNCTION``: module:function); "" = the nodes alone have the data.
        task: name of the task; "" = the one that the targets show.
        num_classes: number of classes; 0 = those found.
        image_size: height and width of the images; 0 = those of the first image (``npz``: of all).
        positive_values: comma list of targets that count as 1, or ``>NUMBER``; all others count as 0.
        class_names: comma list of the classes in the order of their numbers; "" = in the order of the alphabet.
        missing: "refuse", or "mean" for the mean of the training examples.
        missing_values: comma list of texts in CSV files that mean a missing value, in any case.
        decimal: "point", or "comma" for CSV files whose numbers have decimal commas.
        encoding: of the CSV files that are not UTF-8; "" = such files are refused.
        intensity_range: ``LOW,HIGH``, the values that become 0 and 255 in images with more than 8 bits a channel; "" =
            0 and 65,535.
        test_share: share of the examples that are test examples, where the data do not say.
        data_check: "refuse" makes an error of what the data check finds.
        input_shape: ``FUNCTION``: comma list, the shape of an input; "" = that of the first one.
        sites: ``FUNCTION``: the sites that are asked for, by number or by a node's ``data-path``.
    """

    kind: str
    path: str
    task: str = ""
    num_classes: int = 0
    image_size: int = 0
    label_column: str = ""
    client_column: str = ""
    group_column: str = ""
    split_column: str = ""
    feature_columns: str = ""
    positive_values: str = ""
    class_names: str = ""
    missing: str = "refuse"
    missing_values: str = MISSING_VALUES
    decimal: str = "point"
    encoding: str = ""
    skip_unreadable: bool = False
    intensity_range: str = ""
    test_share: float = 0.2
    data_check: str = "warn"
    input_shape: str = ""
    sites: tuple[int | str, ...] = ()

    def __post_init__(self) -> None:
        """Bring the names in the config to the form of those in the data, see ``one_form``."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str) and field.name not in ("kind", "path"):
                object.__setattr__(self, field.name, one_form(value))

    @property
    def name(self) -> str:
        """The config's ``dataset``."""
        return self.path if self.kind == FUNCTION else f"{self.kind}:{self.path}"

    @property
    def classes(self) -> tuple[str, ...]:
        """The names in ``class_names``."""
        return tuple(listed(self.class_names))

    def stated_shape(self) -> tuple[int, ...]:
        """Return the numbers in ``input_shape``; () without any.

        Raises:
            ConfigError: they are not one to four whole numbers above 0.
        """
        entries = listed(self.input_shape)
        if not all(entry.isdecimal() and int(entry) for entry in entries) or len(entries) > 4:
            raise ConfigError(
                f"input-shape={self.input_shape!r} must be the shape of one input: features; channels,length; channels,"
                "height,width; or channels,depth,height,width."
            )
        return tuple(map(int, entries))

    def window(self) -> tuple[float, float] | None:
        """Return the numbers in ``intensity_range``; None without any.

        Raises:
            ConfigError: they are not two numbers, the lower one first.
        """
        entries = listed(self.intensity_range)
        if not entries:
            return None
        if len(entries) == 2 and all(map(is_number, entries)):
            low, high = map(float, entries)
            if low < high and math.isfinite(high - low):
                return low, high
        raise ConfigError(
            f"intensity-range={self.intensity_range!r} must be two numbers, LOW,HIGH, such as 0,4095: the values that "
            "become black and white."
        )

    def problem(self, text: str) -> DataError:
        """Return the error that says what is wrong with these data."""
        return DataError(f"dataset={self.name!r}: {text}")

    @staticmethod
    def parse(dataset: str) -> tuple[str, str]:
        """Return kind and path.

        Raises:
            ConfigError: the kind is unknown, or the path is relative.
        """
        if is_function(dataset, KINDS):
            return FUNCTION, dataset
        kind, _, path = dataset.partition(":")
        path = os.path.expanduser(path)
        if kind not in KINDS:
            raise unknown_name("kind of own data", kind, KINDS)
        if path and kind != "hf" and not Path(path).is_absolute():
            raise ConfigError(
                f"dataset={dataset!r} is relative, and nodes run in other folders. Write the absolute path (seen from "
                f"the folder of this process: '{kind}:{Path(path).absolute()}')."
            )
        return kind, path

    def refuse_odd_names(self, names: Sequence[str]) -> None:
        """Raise DataError if names of files or folders are not UTF-8: no file of results could hold them."""
        odd = [name for name in names if not _is_utf8(name)]
        if odd:
            raise self.problem(f"the names of {len(odd)} files or folders are not UTF-8 ({shown(odd)}). Rename them.")

    def existing(self) -> Path:
        """Return the path.

        Raises:
            DataError: nothing is there.
        """
        path = Path(self.path)
        if path.exists():
            return path
        parent = path.parent
        beside = f" {parent} has {shown(sorted(os.listdir(parent)))}." if parent.is_dir() else ""
        raise self.problem(f"there is no such file or folder.{beside}")


def numbered(values: Sequence[object]) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Return the number of each value and the names by number; numbers come in their order, text by the alphabet."""
    unique = sorted(set(values), key=lambda v: (isinstance(v, str), v))
    index = {value: at for at, value in enumerate(unique)}
    return np.array([index[value] for value in values], np.int64), tuple(str(value) for value in unique)


def numbered_classes(
    request: OwnData, values: Sequence[object], what: str, known: Sequence[str] = ()
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Return the class of each value and the names of the classes: the config's, else the known ones, else all values.

    Raises:
        DataError: a value is none of the config's classes.
    """
    names = tuple(request.classes or known)
    if not names:
        return numbered(values)
    number = {name: at for at, name in enumerate(names)}
    if unknown := sorted({str(value) for value in values} - number.keys()):
        raise request.problem(f"{what} have {shown(unknown)}; class-names has {shown(names, 20)}.")
    return np.array([number[str(value)] for value in values], np.int64), names


def warning_of_gaps(request: OwnData, count: int, largest: int) -> tuple[str, ...]:
    """Return the warning that few of the numbers 0 to ``largest`` are classes; () if the config has their number."""
    if request.num_classes or largest < _MANY or 2 * count > largest:
        return ()
    classes = "1 class" if count == 1 else f"{count} classes"
    return (
        f"{classes}, and the largest is {largest}: a model has {largest + 1} outputs. Save the classes as 0 to "
        f"{max(count - 1, 1)}, or set num-classes={largest + 1} if the others are to come",
    )


def is_number(text: object) -> bool:
    """Return whether Python reads a text as a number."""
    try:
        float(str(text))
    except ValueError:
        return False
    return True


def oddly_written(texts: Sequence[str]) -> str:
    """Return what is wrong with text that consists of numbers which Python does not read as such; "" otherwise."""
    if all(is_number(text) for text in texts) or not all(_NUMBER.fullmatch(str(text).strip()) for text in texts):
        return ""
    examples = shown(sorted({str(text) for text in texts}), 3)
    return f"numbers with a decimal comma, a thousands separator or a trailing % ({examples}): write 0.5 and 1100"


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def left_out(request: OwnData, names: Sequence[str]) -> tuple[str, ...]:
    """Return the note of files that are not read because of their type; () without any."""
    if not names:
        return ()
    number = "1 file of another type" if len(names) == 1 else f"{len(names)} files of other types"
    return (f"left out: {number} in dataset={request.name!r} ({shown(sorted(names), 5)})",)


def shown(names: Sequence[str], most: int = 8) -> str:
    """Return the first names, for messages; bytes of a name that are not UTF-8 as numbers."""
    text = ", ".join([*names[:most], *(["..."] if len(names) > most else [])]) or "nothing"
    return text.encode(errors="backslashreplace").decode()


def chosen_task(request: OwnData, shown_by_targets: str, allowed: Sequence[str]) -> Task:
    """Return the task of the config, or the one that the targets show.

    Raises:
        ConfigError: the targets are not for this task.
    """
    name = request.task or shown_by_targets
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    if name not in allowed:
        raise ConfigError(
            f"task={name} does not fit the targets of dataset={request.name!r}, which are for {' or '.join(allowed)}."
        )
    return TASKS[name]
