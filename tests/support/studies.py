"""Studies of a test from the text of their file."""

from __future__ import annotations

from pathlib import Path

from fedbn_flwr.lab.studies.check_study import load_study
from fedbn_flwr.lab.studies.study import Study


def load(folder: Path, text: str, *overrides: str) -> Study:
    """Write ``study.yaml`` into the folder, and load it."""
    path = folder / "study.yaml"
    path.write_text(text)
    return load_study(path, overrides)
