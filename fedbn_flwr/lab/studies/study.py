"""A study file with a grid of methods, splits and seeds.

A study file::

    name: digits
    base: {dataset: digits, model: lenet, num-clients: 5}
    methods: {FedAvg+BN: {strategy: fedavg}, FedBN: {strategy: fedbn}}
    splits: {iid: {partition: iid}, non-iid: {partition: classes, classes-per-client: 2}}
    seeds: [0, 1, 2]
    skip: [FedBN/iid]
    paper: {FedAvg+BN/iid: 91.35 ± 0.24}

The table shows the main metric of each run, from the first test of ``eval-on``. All
other metrics are in the ``tests.csv`` of the runs.

``paper`` has the numbers of a paper, for ``studies/papers.py``; a sweep ignores them.

``methods`` and ``splits`` override ``base``. A method's settings override the split's
settings. ``overrides`` has settings by METHOD/SPLIT that override all others. If a key
of ``base`` has no effect in a run, this run leaves the key out, with a line in the log.
Each run has the folder ``OUT/METHOD/SPLIT/seed-N``.

``tune`` chooses settings before the runs, separately for each METHOD/SPLIT, by the
score on validation examples::

    tune:
      grid: {learning-rate: [0.3, 0.1, 0.03, 0.01]}
      base: {validation-share: 0.2, num-server-rounds: 30}
      seeds: [0]

Every combination of the grid is run with the settings of ``tune.base``. The score of a
combination is the mean over ``tune.seeds`` of the score in the last round, or in the
best round with ``early-stopping``. The combination with the best score is used. The
test set is not used to choose. The trials are a study of their own in ``OUT/tune``,
with a split SPLIT/POINT for each combination, and this study reads its scores.

``small`` has changes of the file for a small study of the same question: mappings are
changed key by key, and null removes a key. ``sweep STUDY --small`` uses them.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
)

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config, Scalar, read_overrides
from fedbn_flwr.lab.config.yaml_text import read_yaml
from fedbn_flwr.server.methods.params import text_of

__all__ = [
    "AVERAGE",
    "TUNE",
    "WHOLE",
    "Cell",
    "Study",
    "StudySettings",
    "Tuning",
    "point_name",
]

AVERAGE = "average"  # name of the average over the domains
TUNE = "tune"  # folder of the trials, in the folder of their study
WHOLE = ""  # name of all domains together


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Attributes:
        method: name of the method.
        split: name of the split.
        seed: seed of the run.
        settings: the run's own settings. They override ``base``.
        base: the settings that all runs share.
    """

    method: str
    split: str
    seed: int
    settings: Mapping[str, Scalar]
    base: Mapping[str, Scalar]

    @property
    def name(self) -> str:
        """METHOD/SPLIT/seed-N."""
        return f"{self.method}/{self.split}/seed-{self.seed}"

    @functools.cached_property
    def config(self) -> Config:
        """The run's config.

        Raises:
            ConfigError: a setting is wrong.
        """
        return Config.make_of_shared(self.base, self.settings)[0]

    @property
    def dropped(self) -> dict[str, str]:
        """The keys of ``base`` that this run leaves out as without effect, and why."""
        return Config.make_of_shared(self.base, self.settings)[1]

    def folder(self, out: Path) -> Path:
        """Return the run's folder under ``out``."""
        folder = out
        for part in self.name.split("/"):
            name = re.sub(r"[^A-Za-z0-9._+=-]", "_", part)
            # Replace the names "", "." and "..", because they are paths of other
            # folders.
            if not name.strip("."):
                name = "_" * max(1, len(name))
            folder /= name
        return folder


def point_name(point: Mapping[str, Scalar]) -> str:
    """Return the name of a combination of ``tune``, such as "learning-rate=0.1"."""
    return ",".join(f"{key}={value}" for key, value in point.items())


StudySettings = dict[str, Scalar]


class Tuning(BaseModel):
    """The trials that choose settings, with an example in the module's docstring."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    grid: Annotated[
        dict[str, Annotated[list[Scalar], Field(min_length=1)]],
        Field(min_length=1),
    ]
    base: StudySettings = Field(default_factory=dict)
    seeds: list[int] = Field(default_factory=lambda: [0], min_length=1)

    def points(self) -> list[StudySettings]:
        """Return every combination of the grid. The last key changes fastest."""
        combinations = itertools.product(*self.grid.values())
        return [dict(zip(self.grid, values, strict=True)) for values in combinations]


class Study(BaseModel):
    """A study file, with an example in the module's docstring."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    base: StudySettings = Field(default_factory=dict)
    methods: dict[str, StudySettings] = Field(min_length=1)
    splits: dict[str, StudySettings] = Field(default={"all": {}}, min_length=1)
    seeds: list[int] = Field(default_factory=lambda: [0], min_length=1)
    skip: list[str] = Field(default_factory=list)
    paper: dict[str, Any] = Field(default_factory=dict)
    overrides: dict[str, StudySettings] = Field(default_factory=dict)
    tune: Tuning | None = None

    @classmethod
    def read(
        cls, path: Path, overrides: Sequence[str] = (), small: bool = False
    ) -> Study:
        """Read a study file.

        The configs of its runs are not made, because their data may be elsewhere.

        Args:
            path: the YAML file.
            overrides: ``key=value`` settings that override its ``base``, such as a data
                folder.
            small: apply the changes of the file's section ``small``.

        Raises:
            ConfigError: the file is not a study.
        """
        read = read_yaml(path, "study")
        changes = read.pop("small", None)
        if small:
            if not isinstance(changes, dict):
                raise ConfigError(f"study {path} has no section small with settings.")
            read = _changed(read, {"name": f"{read.get('name')}, small", **changes})
        if overrides:
            base = read.get("base") or {}
            if isinstance(base, dict):
                read["base"] = {**base, **read_overrides(overrides)}
        try:
            return cls.model_validate(read)
        except ValidationError as error:
            lines = []
            for problem in error.errors():
                where = ".".join(map(str, problem["loc"]))
                text = f"{where}: {text_of(problem)}"
                if problem["type"] == "missing":
                    text = f"the study needs the key {where}"
                lines.append(f"study {path}: {text}")
            raise ConfigError("\n".join(lines)) from error

    def to_mapping(self) -> dict[str, Any]:
        """Return the content of a study file from which ``read`` makes this study."""
        return self.model_dump(exclude_defaults=True)

    def names(self) -> list[str]:
        """Return METHOD/SPLIT of every pair, in the order of the file."""
        return [f"{method}/{split}" for method in self.methods for split in self.splits]

    def cells(self) -> Iterator[Cell]:
        """Yield all runs that the study does not skip, in their order."""
        # Do all runs of a seed before the next seed, so that a stopped study has
        # complete tables for the first seeds.
        for seed in self.seeds:
            for split, of_split in self.splits.items():
                for method, of_method in self.methods.items():
                    name = f"{method}/{split}"
                    if name not in self.skip:
                        # The last of these layers wins.
                        own = self.overrides.get(name, {})
                        settings = {**of_split, **of_method, **own, "seed": seed}
                        yield Cell(method, split, seed, settings, self.base)

    def tuning(self) -> Study | None:
        """Return the study of the trials of ``tune``, or None without ``tune``.

        It has a split SPLIT/POINT for each split and each combination of the grid. Its
        runs are in ``OUT/tune``.
        """
        if self.tune is None:
            return None
        splits, overrides = {}, {}
        for point in self.tune.points():
            for split, of_split in self.splits.items():
                tried = f"{split}/{point_name(point)}"
                splits[tried] = of_split
                for method in self.methods:
                    own = self.overrides.get(f"{method}/{split}", {})
                    of_trial = {**own, **self.tune.base, **point}
                    overrides[f"{method}/{tried}"] = of_trial
        update: dict[str, Any] = {"splits": splits, "overrides": overrides}
        update |= {"name": f"tuning {self.name}", "seeds": self.tune.seeds}
        update["skip"] = [
            f"{name}/{point_name(point)}"
            for name in self.skip
            for point in self.tune.points()
        ]
        return self.model_copy(update={**update, "paper": {}, "tune": None})

    def grids(self, out: Path) -> dict[Path, Study]:
        """Return the studies by folder, in their order: that of ``tune``, and this."""
        tuning = self.tuning()
        return {out / TUNE: tuning, out: self} if tuning else {out: self}

    def with_chosen(self, chosen: Mapping[str, StudySettings]) -> Study:
        """Return the study with the settings that ``tune`` chose.

        It keeps ``tune``, so the same sweep of its file chooses the same settings.
        """
        overrides = dict(self.overrides)
        for name, settings in chosen.items():
            overrides[name] = {**overrides.get(name, {}), **settings}
        return self.model_copy(update={"overrides": overrides})

    def shortened(self, rounds: int) -> Study:
        """Return the study with so many rounds and one test in each run, and no trials."""
        short: StudySettings = {"num-server-rounds": rounds, "eval-every": rounds}
        study = self.with_chosen(dict.fromkeys(self.names(), short))
        name = f"{self.name}, {rounds} rounds"
        return study.model_copy(update={"name": name, "tune": None})


def _changed(full: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a mapping with changes; null removes a key."""
    result = dict(full)
    for key, value in changes.items():
        old = full.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _changed(old, value)
        result[key] = value
    return {key: value for key, value in result.items() if value not in ("null", "~")}
