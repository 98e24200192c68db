"""Words of the command line."""

from __future__ import annotations

from collections.abc import Mapping


def kebab(settings: Mapping) -> dict:
    """Return settings of Python's names with the keys of a config."""
    return {key.replace("_", "-"): value for key, value in settings.items()}


def set_options(settings: Mapping[str, object]) -> list[str]:
    """Return the options that set these config keys."""
    words = []
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    return words
