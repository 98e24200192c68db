"""The bundle that Flower sends of an app."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from flwr.cli.build import build_fab_from_disk


def unpacked(app: Path, folder: Path) -> Path:
    """Let Flower check and bundle the app, and return the unpacked folder.

    Nodes import from this folder.
    """
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as bundle:
        bundle.extractall(folder)
    return folder
