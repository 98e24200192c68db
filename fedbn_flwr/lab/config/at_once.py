"""The problems of a config that can be told before torch is imported, which takes seconds.

The keys are checked by the types and limits in ``table.json``, and then together by ``checks.py`` itself, which asks
``Known`` for what the registries say. What the table cannot tell (own data, settings of the methods, privacy) is left
to ``Config``, which checks everything again.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import SchemaValidator, ValidationError

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config.checks import problems_of
from fedbn_flwr.lab.config.reading import RENAMED, merged, read_settings, refuse_bool, two_lengths
from fedbn_flwr.lab.config.table import table
from fedbn_flwr.lab.config.texts import check_known, explain

__all__ = ["problems_at_once", "refuse_at_once", "refuse_settings_at_once"]

# A value of these other than the default is read by the full check alone.
_READ_LATER = (
    *("augment", "client-hooks", "dp", "eval-on", "local-part", "lr-decay-at"),
    *("lr-decay-factor", "masked-sums", "metrics", "series", "server-step"),
    *("task", "test-bn"),
)


class _Untold(Exception):
    """The table does not tell."""


def refuse_at_once(path: Path | None = None, overrides: Sequence[str] = (), **settings: Any) -> None:
    """Raise the error of a config if all its problems can be told without torch.

    Args:
        path: a YAML file.
        overrides: texts ``key=value``.
        settings: further settings by field name, which the others replace.

    Raises:
        ConfigError: what ``Config.load`` would raise. That it is not raised says nothing.
    """
    of_caller = {name.replace("_", "-"): value for name, value in settings.items()}
    refuse_settings_at_once(of_caller, *read_settings(path, overrides))


def refuse_settings_at_once(*sources: Mapping[str, Any]) -> None:
    """Raise the error of settings, of which a later source replaces the former, as ``refuse_at_once`` does."""
    if any(old in source for old in RENAMED for source in sources):
        return  # ``Config`` warns of the old name, once
    if problems := problems_at_once(merged(sources)):
        raise ConfigError("\n".join(problems))


def problems_at_once(settings: Mapping[str, Any]) -> list[str]:
    """Return all problems of settings under their new names; none where there are none, or the table cannot tell."""
    keys = table()["keys"]
    if settings.get("dp") == "record" or any(keys.get(key) and not keys[key]["schema"] for key in settings):
        return []  # the first stands for other keys
    values, invalid = _each(settings)
    try:
        return [*two_lengths(settings), *invalid, *problems_of(Known(values))]
    except _Untold:
        return []


def _each(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the valid settings, and what is wrong with the others, each by itself."""
    problems: list[str] = []
    try:
        return _validator().validate_python(settings), problems
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            problems += explain(problem, list(table()["keys"]))
        invalid = {str(problem["loc"][0]) for problem in error.errors(include_url=False)}
    return _validator().validate_python({key: settings[key] for key in settings if str(key) not in invalid}), problems


@functools.cache
def _validator() -> SchemaValidator:
    """Return what checks each key by itself."""
    fields = {
        key: {"type": "typed-dict-field", "required": False, "schema": _refusing_bool(key, entry["schema"])}
        for key, entry in table()["keys"].items()
        if entry["schema"]
    }
    config = {"coerce_numbers_to_str": True, "allow_inf_nan": False}
    schema: Any = {"type": "typed-dict", "fields": fields, "extra_behavior": "forbid", "config": config}
    return SchemaValidator(schema)


def _refusing_bool(key: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    def before(value: Any) -> Any:
        return refuse_bool(key, value, schema["type"])

    return {"type": "function-before", "function": {"type": "no-info", "function": before}, "schema": schema}


@dataclass(frozen=True)
class _Task:
    """What the checks ask of a task, as those of ``training.tasks`` answer."""

    name: str
    by_pixel: bool


@dataclass(frozen=True)
class _Data:
    """What the checks ask of a data set of the registry, as ``DatasetInfo`` answers."""

    num_classes: int
    task: _Task
    tasks: tuple[str, ...] = ()
    input_shape: tuple[int, ...] = ()  # those of the registry are images


class Known:
    """The settings of a run, each an attribute, and what ``checks.py`` asks of ``Values``, by the table alone."""

    protected = False

    def __init__(self, given: Mapping[str, Any]) -> None:
        defaults = {key: entry["default"] for key, entry in table()["keys"].items()}
        self._set = {key.replace("-", "_") for key, value in given.items() if value != defaults[key]}
        if not self._set.isdisjoint(key.replace("-", "_") for key in _READ_LATER):
            raise _Untold
        self._values = {key.replace("-", "_"): value for key, value in {**defaults, **given}.items()}

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(name) from None

    def known(self, key: str) -> Collection[str]:
        """Return the names that a key takes."""
        names: list[str] = table()["allowed"][key]
        return names

    def is_own(self) -> bool:
        """Return whether the data are the user's own: what they are is read from files."""
        if ":" in self.dataset:
            raise _Untold
        return False

    def added_methods(self) -> list[tuple[str, str]]:
        """Return the methods that are added to the strategy: none."""
        return []

    def method_names(self) -> list[str]:
        """Return the methods of the run."""
        return [self.strategy]

    def problems(self, kind: str) -> list[Any]:
        """Return the problems of the methods' settings: none, where no setting differs that their checks read."""
        read = table()["methods"][self.strategy]
        if read is None or not self._set.isdisjoint(read):
            raise _Untold
        return []

    def data_info(self) -> _Data:
        """Return the description of the run's data."""
        if not self.is_own():
            check_known("dataset", self.dataset, self.known("dataset"))
        classes, name, by_pixel = table()["datasets"][self.dataset]
        return _Data(classes, _Task(name, by_pixel))

    def learning_task(self) -> _Task:
        """Return the task: that of the data."""
        return self.data_info().task

    def per_pixel(self) -> bool | None:
        """Return whether the model's outputs are by pixel."""
        if self.model not in table()["models"] or "<" in self.model:  # a form of names
            raise _Untold
        by_pixel: bool | None = table()["models"][self.model]
        return by_pixel

    def models_for(self, by_pixel: bool) -> list[str]:
        """Return the models whose outputs fit a task with targets for each pixel, or for each example."""
        return [name for name, gives in table()["models"].items() if gives in (by_pixel, None)]

    def split_name(self) -> str:
        """Return the name of the split."""
        return self.partition or "classes"

    def example_shape(self) -> tuple[int, ...]:
        """Return the shape of an example, which no check reads: models and data sets of the registries always fit."""
        return ()

    def decays(self) -> None:
        """Do nothing: what has another value is not told; so the next ones."""

    augmentation = decays

    def ranges(self) -> None:
        """Return nothing: a config with ranges is read later."""

    def adapted_tests(self) -> list[str]:
        """Return the tests with statistics of the test inputs."""
        return []
