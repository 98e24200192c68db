"""What Flower sends of an app."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from flwr.cli.build import build_fab_from_disk


def unpacked(app: Path, folder: Path) -> Path:
    """Let Flower check the app and bundle it; return the folder with the bundle's
    files, from which nodes import.
    """
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as bundle:
        bundle.extractall(folder)
    return folder
