"""Reading of settings from files and from the command line."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def read_settings(path: Path | None, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Return the settings of a YAML file, if any, and of ``key=value`` texts.

    Values are read as YAML.

    Raises:
        ConfigError: the file is missing, unreadable or not a mapping, or an override
            has no "=".
    """
    # Import here, because a client gets its settings from Flower and needs no reader of
    # YAML.
    from fedbn_flwr.lab.config.yaml_text import read_overrides, read_yaml

    in_file = read_yaml(path, "config") if path else {}
    return [in_file, read_overrides(overrides)]


# --- values that are texts ------------------------------------------------------------
def split(text: str) -> list[str]:
    """Return the texts between commas, stripped, without empty texts.

    Quotes have no meaning here. ``listed`` reads quotes.
    """
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def listed(text: str) -> list[str]:
    """Return the entries of a comma list, stripped, without empty entries.

    Args:
        text: the list, such as ``north,"Paris, Sud"``. As in CSV, an entry with a comma
            has quotes.
    """
    rows = csv.reader([text.strip()], skipinitialspace=True)
    return [entry.strip() for entry in next(rows, []) if entry.strip()]


def number(text: str) -> int | float | None:
    """Return the int or float that a text spells, or None if it spells no number."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return None


def read_decays(at: str, factor: str) -> list[tuple[str, float]]:
    """Return (time, factor) of each decay of the learning rate, with time as text.

    Args:
        at: ``lr-decay-at``; an entry is a round, a share of the rounds or "freeze".
        factor: ``lr-decay-factor``, one for all decays or one for each.
    """
    times, factors = split(at), [float(text) for text in split(factor)]
    if len(factors) == 1:
        factors *= len(times)
    return list(zip(times, factors, strict=True))


CENTRALIZED = "centralized"
