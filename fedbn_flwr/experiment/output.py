"""The output folder of a run, written so that a reader never sees half a file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save

from fedbn_flwr.averaging import State
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.experiment.config import Config

__all__ = ["RunFolder", "read_metrics", "versions", "write_atomically"]


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file in one step: to a temporary name beside it, to the disk, then renamed."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """Return the versions a result depends on."""
    names = ("fedbn-flwr", "flwr", "torch", "torchvision", "numpy", "ray", "flwr-datasets")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ``metrics.jsonl``; a last line cut short by a killed process is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class RunFolder:
    """A run's folder: ``config.yaml``, ``metrics.jsonl``, ``summary.json``, ``model.safetensors``, ``curves.png``.

    Args:
        path: the folder; made here, with its parents.
        config: the fully resolved config.

    Raises:
        ConfigError: the folder is in use or cannot be made.
    """

    def __init__(self, path: Path, config: Config) -> None:
        self.path = path
        self.refuse_used(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_atomically(path / "config.yaml", yaml.safe_dump(config.to_mapping(), sort_keys=False))
        except OSError as error:
            raise ConfigError(f"out={str(path)!r} cannot be written: {error}") from error

    @staticmethod
    def refuse_used(path: Path) -> None:
        """Raise ConfigError where the folder holds anything: results are never overwritten."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"out={str(path)!r} is in use; results are never overwritten. Choose another folder.")

    def add_round(self, line: Mapping[str, Any]) -> None:
        """Append one round to ``metrics.jsonl``, in one write, on the disk before it returns."""
        data = (json.dumps(_clean(line)) + "\n").encode()
        handle = os.open(self.path / "metrics.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, data)
            os.fsync(handle)
        finally:
            os.close(handle)

    def finish(self, state: State, about: Mapping[str, str], summary: Mapping[str, Any]) -> None:
        """Write the model (with what it holds as metadata), the curves and, last, the summary."""
        from fedbn_flwr.experiment.curves import draw_curves

        arrays = {name: np.asarray(array, order="C") for name, array in state.items()}  # keeps 0-dim counters 0-dim
        write_atomically(self.path / "model.safetensors", save(arrays, metadata=dict(about)))
        write_atomically(self.path / "curves.png", draw_curves({"": read_metrics(self.path / "metrics.jsonl")}))
        write_atomically(self.path / "summary.json", json.dumps(_clean(summary), indent=2) + "\n")


def _clean(value: Any) -> Any:
    """Return the value with numbers JSON does not have (NaN, infinity) as null, so that any reader can read it."""
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
