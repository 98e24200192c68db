"""The interface of a tracker, and what all of them need to know of a run."""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.files import STUDY_FILE, read_json

__all__ = ["Memory", "Tracker", "group_of", "name_of", "numbers_of", "summary_of_run", "tags_of"]

_DEEPEST = 8  # folders between a study's and a run's; names of methods and splits may have "/"


class Tracker(ABC):
    """Shows the numbers of one run. Its methods may be slow and may fail: ``Delivery`` calls them from a thread.

    Args:
        config: the run's config.
        folder: its folder.
        after: the last finished round, 0 for a new run; the rounds after it are repeated.

    Attributes:
        key: the config key that turns it on; also the name of the extra that installs it.
        module: the module that must be installed.
        package: this module.
        redone_after: the round after which repeated rounds have other numbers; None where they have the same.
    """

    key: ClassVar[str]
    module: ClassVar[str]

    def __init__(self, config: Config, folder: Path, after: int) -> None:
        self.config, self.folder = config, folder
        self.package: Any = importlib.import_module(self.module)
        drawn_anew = config.dp != "off" or config.record_dp or config.masked_sums  # their noise, masks or batches
        self.redone_after = after if drawn_anew else None

    @staticmethod
    def problem(config: Config) -> str:
        """Return why the tracker cannot start although it is installed, with the remedy; "" if it can."""
        return ""

    @abstractmethod
    def open(self) -> int:
        """Begin the run there, or continue it; return the last round that it has already, 0 for none."""

    @abstractmethod
    def add_round(self, server_round: int, numbers: Mapping[str, float]) -> None:
        """Add the numbers of a round; rounds come in order, each once."""

    @abstractmethod
    def close(self, summary: Mapping[str, float | str] | None) -> None:
        """End the run there, with its summary; None for a run that failed or was interrupted."""


@dataclass
class Memory:
    """What a tracker keeps in the run's folder: its place, the id of the run there, and the last round that it took."""

    place: str
    id: str = ""
    round: int = 0

    @classmethod
    def read(cls, path: Path, place: str) -> Memory:
        """Return the memory in a file; a new one without it, or if it is of another place."""
        saved = read_json(path)
        return cls(**saved) if saved.get("place") == place else cls(place)

    def write(self, path: Path) -> None:
        """Write the file."""
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, json.dumps(asdict(self)) + "\n")


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of ``metrics.jsonl``, domains as ``metric/domain``; without clients and lists."""
    numbers = {**line}
    for metric, values in line.get("domains", {}).items():
        numbers |= {f"{metric}/{domain}": value for domain, value in values.items()}
    return {name: value for name, value in numbers.items() if _is_number(value) and name != "round"}


def summary_of_run(summary: Mapping[str, Any]) -> dict[str, float | str]:
    """Return the numbers of a summary as ``final/NAME``, ``best/NAME`` and ``ledger/NAME``, and the single values."""
    flat = {**summary}
    for part in ("final", "best", "ledger"):
        flat |= {f"{part}/{name}": value for name, value in summary.get(part, {}).items() if _is_number(value)}
    return {name: value for name, value in flat.items() if _is_number(value) or isinstance(value, str)}


def name_of(config: Config, folder: Path) -> str:
    """Return the name of a run: its folder's, or in a study METHOD/SPLIT/seed-N, tune/METHOD/SPLIT/KEY=VALUE/seed-N."""
    return "/".join(folder.parts[-_depth(config, folder) :])


def group_of(config: Config, folder: Path) -> str:
    """Return the name of what the run belongs to: the study's folder or the ``series``; "" for neither."""
    depth = _depth(config, folder)
    return folder.parts[-depth - 1] if depth > 1 else config.series


def tags_of(config: Config) -> dict[str, str]:
    """Return what one looks for runs by: strategy, norm, model and data set, which for own data is its kind."""
    data = config.dataset.partition(":")[0]
    return {"strategy": config.title, "norm": config.norm, "model": config.model, "dataset": data}


def _depth(config: Config, folder: Path) -> int:
    """Return how many parts at the end of the folder's path are the run's own; a study's folder has its file."""
    if folder.name != f"seed-{config.seed}":
        return 1
    above = folder.absolute().parents[:_DEEPEST]
    return next((depth for depth, parent in enumerate(above, 1) if (parent / STUDY_FILE).is_file()), 1)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
