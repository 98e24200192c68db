"""Texts of a config: comma strings, numbers, ``--set key=value``, and what pydantic says of a bad value."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config.yaml_file import UNREADABLE, read_value

__all__ = ["explain", "number", "read_overrides", "split"]


def split(text: str) -> list[str]:
    """Return the entries of a comma string, stripped, without empty ones."""
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def number(text: str) -> int | float | None:
    """Return the whole or decimal number that a text is; None for another text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return None


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings of ``key=value`` texts; values are read as YAML.

    Raises:
        ConfigError: a text has no "=", or its value cannot be read.
    """
    values: dict[str, Any] = {}
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise ConfigError(f"--set {override!r} must be key=value")
        try:
            # YAML would read ">0" as the head of a text over several lines, and "csv:" as a mapping.
            plain = not value.strip() or value.strip().startswith((">", "|")) or value.strip().endswith(":")
            values[key.strip()] = value.strip() if plain else read_value(value)
        except UNREADABLE as error:
            raise ConfigError(f"--set {override!r}: {error}") from error
    return values


def explain(problem: Any, keys: Sequence[str]) -> list[str]:
    """Return pydantic's problem as text with the config key, its value and what is allowed."""
    key = str(problem["loc"][0]) if problem["loc"] else ""
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        near = difflib.get_close_matches(key, keys, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else " See docs/config.md for all keys."
        return [f"unknown key {key!r}.{hint}"]
    if problem["type"] == "value_error":
        text = str(problem["ctx"]["error"])
        return [f"{key}: {text}"] if key else text.split("\n")
    return [f"{key}={problem['input']!r}: {problem['msg'].lower()}"]
