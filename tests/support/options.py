"""Words of the command line."""

from __future__ import annotations

from collections.abc import Mapping


def set_options(settings: Mapping[str, object]) -> list[str]:
    """Return the options that set these config keys."""
    words: list[str] = []
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    return words
