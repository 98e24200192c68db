"""A study: a grid of runs, methods x splits x seeds, read from a file.

A study file::

    name: digits
    base: {dataset: digits, model: lenet, num-clients: 5}
    methods: {FedAvg+BN: {strategy: fedavg}, FedBN: {strategy: fedbn}}
    splits: {iid: {partition: iid}, non-iid: {partition: classes, classes-per-client: 2}}
    seeds: [0, 1, 2]
    skip: [FedBN/iid]
    paper: {FedAvg+BN/iid: 91.35}

The tables show the main metric of each run, the first one of ``eval-on``; ``metrics`` names others, by their keys in
``summary.json``: ``metrics: [personal-own-auroc, held-out-adapted-auroc]``. A metric that a run does not have is left
out there.

The paper's number may also be given by domain, ``{amazon: 61.3, average: 66.3}``: it is then shown in the table by
domain, a second table for data sets with several domains.

``methods`` and ``splits`` override ``base``; a method's settings override those of the split. A key of ``base`` that
has no effect in a run is left out there, and the log says so. Each run has the folder ``OUT/METHOD/SPLIT/seed-N``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.experiment.config import Config, Scalar, read_overrides
from fedbn_flwr.experiment.yaml_file import read_yaml

__all__ = ["Cell", "Study", "finished", "summary_of"]

Settings = dict[str, Scalar]


class Study(BaseModel):
    """A study file; the module's docstring has an example."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    base: Settings = Field(default_factory=dict)
    methods: dict[str, Settings]
    splits: dict[str, Settings] = {"all": {}}
    seeds: list[int] = Field(default_factory=lambda: [0])
    skip: list[str] = Field(default_factory=list)
    metrics: list[str] = Field(default_factory=list)
    paper: dict[str, float | dict[str, float]] = Field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = ()) -> Study:
        """Read a study file and check the config of every run in it.

        Args:
            path: the YAML file.
            overrides: ``key=value`` settings that override its ``base``, such as a data folder.

        Raises:
            ConfigError: all problems, each with the name of the run.
        """
        read = read_yaml(path, "study")
        try:
            if overrides and isinstance(read, dict) and isinstance(base := read.get("base") or {}, dict):
                read["base"] = {**base, **read_overrides(overrides)}
            study = cls.model_validate(read)
        except ValidationError as error:
            lines = [f"study {path}: {'.'.join(map(str, e['loc']))}: {e['msg'].lower()}" for e in error.errors()]
            raise ConfigError("\n".join(lines)) from error
        named = [*study.skip, *study.paper]
        problems = [f"study {path}: '{name}' names no METHOD/SPLIT" for name in named if name not in study.names()]
        folders: dict[Path, str] = {}
        for cell in study.cells():
            first = folders.setdefault(cell.folder(Path()), cell.name)
            if first != cell.name:
                problems.append(f"study {path}: {first} and {cell.name} would share a folder; rename one of them")
            try:
                _ = cell.config
            except ConfigError as error:
                problems.append(f"study {path}: {cell.name}: {error}")
        for key in read_overrides(overrides):
            if all(key in cell.settings for cell in study.cells()):
                where = "seeds" if key == "seed" else "methods or splits"
                problems.append(f"study {path}: --set {key} has no effect: every run has its own, in {where}")
        if problems:
            raise ConfigError("\n".join(problems))
        return study

    def names(self) -> list[str]:
        """Return METHOD/SPLIT of every pair, in the order of the file."""
        return [f"{method}/{split}" for method in self.methods for split in self.splits]

    def cells(self) -> Iterator[Cell]:
        """Yield all runs except skipped ones, seed by seed: a stopped study has complete tables for the first seeds."""
        for seed in self.seeds:
            for split, split_settings in self.splits.items():
                for method, method_settings in self.methods.items():
                    if f"{method}/{split}" not in self.skip:
                        settings = {**split_settings, **method_settings, "seed": seed}
                        yield Cell(method, split, seed, settings, self.base)


@dataclass(frozen=True)
class Cell:
    """One run of a study: its own settings, and those of ``base``."""

    method: str
    split: str
    seed: int
    settings: Mapping[str, Scalar]
    base: Mapping[str, Scalar]

    @property
    def name(self) -> str:
        """METHOD/SPLIT/seed-N."""
        return f"{self.method}/{self.split}/seed-{self.seed}"

    @property
    def config(self) -> Config:
        """The run's config.

        Raises:
            ConfigError: a setting is wrong.
        """
        return Config.make_of_shared(self.base, self.settings)[0]

    @property
    def dropped(self) -> dict[str, str]:
        """The keys of ``base`` that have no effect in this run, with the reason."""
        return Config.make_of_shared(self.base, self.settings)[1]

    def folder(self, out: Path) -> Path:
        """Return the run's folder under ``out``."""
        return out.joinpath(*(re.sub(r"[^A-Za-z0-9._+=-]", "_", part) for part in self.name.split("/")))


def finished(folder: Path) -> bool:
    """Return whether the run of the folder is finished: its summary is written last."""
    return (folder / "summary.json").is_file()


def summary_of(folder: Path) -> dict[str, Any]:
    """Return the summary of a finished run."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary
