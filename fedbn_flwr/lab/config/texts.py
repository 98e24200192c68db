"""Settings as text: comma strings, numbers, and what pydantic says of a bad value."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from fedbn_flwr.errors import unknown_name

__all__ = ["check_known", "explain", "number", "split", "text_of", "wrong"]


def split(text: str) -> list[str]:
    """Return the entries of a comma string, stripped, without empty ones."""
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def number(text: str) -> int | float | None:
    """Return the whole or decimal number that a text is; None for another text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return None


def check_known(key: str, value: str, allowed: Collection[str]) -> None:
    """Raise a ``ConfigError`` that names the nearest allowed value."""
    if value not in allowed:
        raise unknown_name(key, value, allowed)


def wrong(*checks: tuple[object, str]) -> list[str]:
    """Return the text of each check that is true, in their order: what is wrong."""
    return [text for is_wrong, text in checks if is_wrong]


def explain(problem: Any, keys: Sequence[str]) -> list[str]:
    """Return pydantic's problem as text with the config key, its value and what is allowed."""
    key = str(problem["loc"][0]) if problem["loc"] else ""
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        near = difflib.get_close_matches(key, keys, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else " See docs/config.md for all keys."
        return [f"unknown key {key!r}.{hint}"]
    text = text_of(problem)
    if problem["type"] == "value_error":
        return [f"{key}: {text}"] if key else text.split("\n")
    return [f"{key}={problem['input']!r}: {text}"]


def text_of(problem: Any) -> str:
    """Return what pydantic says of a value, or the text of a validator's own error."""
    return str(problem["ctx"]["error"]) if problem["type"] == "value_error" else str(problem["msg"]).lower()
