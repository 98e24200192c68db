"""The checkout of the tests: its root, its ``pyproject.toml``, and copies of it."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def copied(folder: Path) -> Path:
    """Copy the checkout without the files that git ignores, and return the copy.

    In the checkout, Flower's commands would walk through the environment, for seconds,
    and they refuse a folder with "_" in its name.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0")[:-1]:
        to = folder / "fedbn-flwr" / name
        to.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, to, follow_symlinks=False)
    return folder / "fedbn-flwr"
