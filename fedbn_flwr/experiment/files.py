"""Files of runs and studies that several modules know: their names, and reading JSON, whose errors name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import StateError

__all__ = ["STUDY_FILE", "read_json", "read_metrics"]

STUDY_FILE = "study.yaml"  # in the folder of a study: the study as it is done

_REPEAT = "Restore the file, or remove the run's folder and repeat the run."


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file of a run's folder; empty without the file.

    Raises:
        StateError: the file is damaged.
    """
    return _mapping(_text(path), str(path)) if path.is_file() else {}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ``metrics.jsonl``; an incomplete last line of a killed process is left out.

    Raises:
        StateError: another line is damaged.
    """
    lines = _text(path).splitlines(keepends=True) if path.is_file() else []
    return [_mapping(line, f"{path}, line {number},") for number, line in enumerate(lines, 1) if line.endswith("\n")]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _mapping(text: str, where: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise StateError(f"{where} is damaged: {error}. {_REPEAT}") from error
    if not isinstance(content, dict):
        raise StateError(f"{where} is damaged: it holds no mapping. {_REPEAT}")
    return content
