"""How settings are read before they are checked: files, texts, old names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import ConfigError

__all__ = ["RENAMED", "merged", "new_names", "read_settings", "refuse_bool"]

RENAMED = {"fedtan-exchange": "fedtan-transport"}
"""Old name to new name of keys; YAML and ``--set`` may still have the old name."""

logger = logging.getLogger("flwr")


def read_settings(path: Path | None, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Return the settings of a YAML file, if any, and those of ``key=value`` texts.

    Values are read as YAML.

    Raises:
        ConfigError: the file is missing, unreadable or no mapping, or an override has
            no "=".
    """
    # A client has its settings from Flower, and does without YAML.
    from fedbn_flwr.lab.config.yaml_text import read_overrides, read_yaml

    in_file = read_yaml(path, "config") if path else {}
    if not isinstance(in_file, dict):
        raise ConfigError(
            f"config {path} must be a mapping of keys to values, not"
            f" {type(in_file).__name__}"
        )
    return [in_file, read_overrides(overrides)]


def merged(sources: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of several sources under their new names.

    The last source takes precedence.

    Raises:
        ConfigError: a source has a setting under both of its names.
    """
    settings: dict[str, Any] = {}
    problems: list[str] = []
    for source in sources:
        renamed, twice = new_names(source)
        settings |= renamed
        problems += twice
    if problems:
        raise ConfigError("\n".join(problems))
    return settings


def new_names(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings under their new names, and a line for each that has both.

    Old names are warned of.
    """
    twice = []
    for old, new in RENAMED.items():
        if old not in values:
            continue
        logger.warning(
            "config key %r is now %r; the old name is read in this release only",
            old,
            new,
        )
        if new in values:
            both = f"{old}={values[old]} and {new}={values[new]} are both set"
            twice.append(f"{both}; {old} is the old name: remove it")
    return {RENAMED.get(key, key): value for key, value in values.items()}, twice


def refuse_bool(key: str, value: Any, wanted: str) -> Any:
    """Return the value of a key; refuse true and false for a number or a text.

    Pydantic would read them as 1 and 0.

    Args:
        key: the key or the field's name; ``dp`` reads YAML's ``off``.
        value: what was given.
        wanted: the type of the key: "bool", "str", or another one.

    Raises:
        ValueError: the value is true or false, and another type is wanted.
    """
    if value is False and key == "dp":
        return "off"
    if isinstance(value, bool) and wanted != "bool":
        hint = ""
        if wanted == "str":
            hint = """ (YAML reads yes, no, on and off so: use quotes, "'yes'")"""
        raise ValueError(f"{str(value).lower()} is neither a number nor text{hint}")
    return value
