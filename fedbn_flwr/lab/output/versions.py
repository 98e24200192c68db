"""The versions that a result depends on: packages, and the commit of a checkout."""

from __future__ import annotations

import functools
import platform
import subprocess
from importlib import metadata
from pathlib import Path

__all__ = ["commit_of", "versions"]


def versions(*more: str) -> dict[str, str]:
    """Return the versions of the packages that a result depends on, and of ``more``.

    That of fedbn-flwr names the commit where it runs from a checkout, as 0.1.0+g1a2b3c4 or 0.1.0+g1a2b3c4.changed.
    """
    names = ("fedbn-flwr", "flwr", "torch", "torchvision", "numpy", "ray", "flwr-datasets", *more)
    installed = {"python": platform.python_version()}
    for name in names:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = "not installed"
    installed["fedbn-flwr"] += commit_of(Path(__file__).parents[2])
    return installed


@functools.cache
def commit_of(package: Path) -> str:
    """Return "+g" and the commit of a package that git tracks, ".changed" if its files differ from it; "" elsewhere."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # the folder may lie in a repository of something else
        commit, changed = git("rev-parse", "--short=7", "HEAD"), git("status", "--porcelain", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"+g{commit}" + ".changed" * bool(changed)
