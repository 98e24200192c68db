"""A study: a grid of runs, methods x splits x seeds, read from a file.

A study file::

    name: digits
    base: {dataset: digits, model: lenet, num-clients: 5}
    methods: {FedAvg+BN: {strategy: fedavg}, FedBN: {strategy: fedbn}}
    splits: {iid: {partition: iid}, non-iid: {partition: classes, classes-per-client: 2}}
    seeds: [0, 1, 2]
    skip: [FedBN/iid]
    paper: {FedAvg+BN/iid: 91.35 ± 0.24}

The tables show the main metric of each run, the first one of ``eval-on``; ``metrics`` names others, by their keys in
``summary.json``: ``metrics: [personal-own-auroc, held-out-adapted-auroc]``. A metric that a run does not have is left
out there.

The paper's number, with its ± or without, may also be given by domain, ``{amazon: 61.3, average: 66.3 ± 0.7}``: it is
then shown in the table by domain, a second table for data sets with several domains. The average is shown in the first
table, too, if the main metric is the average over the domains.

``methods`` and ``splits`` override ``base``, a method's settings override those of the split, and ``overrides``, by
METHOD/SPLIT, override all. A key of ``base`` that has no effect in a run is left out there, and the log says so. Each
run has the folder ``OUT/METHOD/SPLIT/seed-N``.

``target: 60`` adds the rounds, exchanges and bytes until the main metric was first at 60, in the unit of the table; it
may be given by split, ``{iid: 90, non-iid: 60}``.

``tune`` chooses settings before the runs, for each METHOD/SPLIT on its own, by the score on validation examples::

    tune:
      grid: {learning-rate: [0.3, 0.1, 0.03, 0.01]}
      base: {validation-share: 0.2, num-server-rounds: 30}
      seeds: [0]

Every combination of the grid is run with the settings of ``tune.base``; the one with the highest mean score of the last
round (of the best, with ``early-stopping``) over ``tune.seeds`` is used. The test set is not used to choose. Trials are
in ``OUT/tune/METHOD/SPLIT/``.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, field_validator

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.experiment.config import Config, Scalar, number, read_overrides
from fedbn_flwr.experiment.config.yaml_file import read_yaml
from fedbn_flwr.experiment.files import read_json
from fedbn_flwr.experiment.output.global_tests import headlines
from fedbn_flwr.experiment.studies.numbers import WHOLE, PaperNumber
from fedbn_flwr.strategies import FedBS
from fedbn_flwr.training.tasks import in_percent

__all__ = [
    "FAILED",
    "Cell",
    "Study",
    "StudySettings",
    "Tuning",
    "failure_of",
    "finished",
    "summary_of",
    "trial_name",
]

_LONGEST = 200  # characters of a folder's name; file systems take 255 bytes
_ENDINGS = (".csv", ".html", ".jsonl", ".md", ".png", ".yaml")
FAILED = "failed.json"  # in the folder of a run that a sweep could not finish: the error

StudySettings = dict[str, Scalar]


class Tuning(BaseModel):
    """The trials that choose settings; the module's docstring has an example."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    grid: dict[str, Annotated[list[Scalar], Field(min_length=1)]] = Field(min_length=1)
    base: StudySettings = Field(default_factory=dict)
    seeds: list[int] = Field(default_factory=lambda: [0], min_length=1)

    @field_validator("grid")
    @classmethod
    def _as_numbers(cls, grid: dict[str, list[Scalar]]) -> dict[str, list[Scalar]]:
        """Take ``1e-3`` as a number, which YAML reads as a text."""
        return {key: [_number(value) for value in values] for key, values in grid.items()}

    def points(self) -> list[StudySettings]:
        """Return every combination of the grid, the last key changing first."""
        return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]


class Study(BaseModel):
    """A study file; the module's docstring has an example."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    base: StudySettings = Field(default_factory=dict)
    methods: dict[str, StudySettings] = Field(min_length=1)
    splits: dict[str, StudySettings] = Field(default={"all": {}}, min_length=1)
    seeds: list[int] = Field(default_factory=lambda: [0], min_length=1)
    skip: list[str] = Field(default_factory=list)
    metrics: list[str] = Field(default_factory=list)
    paper: dict[str, Any] = Field(default_factory=dict)
    overrides: dict[str, StudySettings] = Field(default_factory=dict)
    target: FiniteFloat | dict[str, FiniteFloat] | None = None
    tune: Tuning | None = None

    @field_validator("paper")
    @classmethod
    def _read_paper(cls, paper: dict[str, Any]) -> dict[str, Any]:
        problems = []
        for name, stated in paper.items():
            for domain, value in stated.items() if isinstance(stated, dict) else ((WHOLE, stated),):
                try:
                    PaperNumber.read(value)
                except ValueError as error:
                    problems.append(f"{name}{domain and f', {domain}'}: {error}")
        if problems:
            raise ValueError("; ".join(problems))
        return paper

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = ()) -> Study:
        """Read a study file and check the config of every run in it.

        Args:
            path: the YAML file.
            overrides: ``key=value`` settings that override its ``base``, such as a data folder.

        Raises:
            ConfigError: all problems, each with the name of the run.
        """
        study = cls.read(path, overrides)
        if problems := [f"study {path}: {problem}" for problem in study._problems(read_overrides(overrides))]:
            raise ConfigError("\n".join(problems))
        return study

    @classmethod
    def read(cls, path: Path, overrides: Sequence[str] = ()) -> Study:
        """Read a study file; the configs of its runs are not made, so that their data may be elsewhere.

        Args:
            path: as for ``load``.
            overrides: as for ``load``.

        Raises:
            ConfigError: the file is no study.
        """
        read = read_yaml(path, "study")
        try:
            if overrides and isinstance(read, dict) and isinstance(base := read.get("base") or {}, dict):
                read["base"] = {**base, **read_overrides(overrides)}
            return cls.model_validate(read)
        except ValidationError as error:
            lines = [f"study {path}: {'.'.join(map(str, e['loc']))}: {_text_of(e)}" for e in error.errors()]
            raise ConfigError("\n".join(lines)) from error

    def _problems(self, given: Mapping[str, Any]) -> Iterator[str]:
        """Yield what is wrong, with the name of the run; ``given`` are the settings of the command."""
        yield from self._wrong_names()
        yield from dict.fromkeys(self._unusable_names())
        yield from self._unusable_papers()
        for what, keys in self._places():
            if "seed" in keys and not (what == "base" and "seed" in given):  # of the command: see below
                yield f"{what}: seed has no effect here; list the seeds under {'tune.' * what.startswith('tune')}seeds"
        yield from self._problems_of_runs()
        for key in given:
            if all(key in cell.settings for cell in self.cells()):
                of_seed = f"seeds; --seed {given[key]} does the runs of that one"
                where = of_seed if key == "seed" else "methods or splits"
                yield f"--set {key} has no effect: every run has its own, in {where}"

    def _wrong_names(self) -> Iterator[str]:
        """Yield what is listed twice, and names that are none of the study."""
        for what, values in self._lists():
            if repeated := {str(value) for value in values if values.count(value) > 1}:
                yield f"{what}: {', '.join(sorted(repeated))} is listed twice"
        for name in (*self.skip, *self.paper, *self.overrides):
            if name not in self.names():
                yield f"'{name}' names no METHOD/SPLIT"
        for split in self.target if isinstance(self.target, dict) else ():
            if split not in self.splits:
                yield f"target: '{split}' is not one of splits ({', '.join(self.splits)})"
        if not any(True for _ in self.cells()):
            yield f"skip leaves out every run: {', '.join(self.skip)}"

    def _problems_of_runs(self) -> Iterator[str]:
        """Yield folders that two runs would share, settings that are wrong, and runs that are tied together."""
        folders: dict[Path, tuple[str, str, str, int]] = {}
        tied: dict[str, str] = {}
        shares: dict[str, float] = {}  # of the runs, which come before the trials
        for cell in (*self.cells(), *self.trials()):
            own = cell.method, cell.split, cell.trial, cell.seed
            first = folders.setdefault(cell.folder(Path()), own)
            if first != own:
                twins = [f"method {method!r} on split {split!r}" for method, split, *_ in (first, own)]
                yield f"{twins[0]} and {twins[1]} would share the folder {cell.folder(Path())}; rename one of them"
            try:
                config = cell.config
            except ConfigError as error:
                yield f"{cell.name}: {error}"
                continue
            if config.series:
                tied[cell.name] = config.series
            pair = f"{cell.method}/{cell.split}"
            if not cell.trial:
                shares[pair] = config.validation_share
            elif not config.validation_share:
                yield f"{cell.name}: tune chooses by validation examples; set validation-share in tune.base"
            elif config.strategy == FedBS.name and not shares.get(pair):
                yield (
                    f"{cell.name}: with validation-share fedbs weighs by the validation loss, without by the "
                    "training loss; set validation-share for the runs, too, so that trials and runs do the same"
                )
        if tied:
            one, more = next(iter(tied)), len(tied) - 1
            yield (
                f"{one}{f' and {more} other runs' if more else ''}: series={tied[one]} ties runs together: a run "
                "starts with the parts that clients kept in the run before, and parallel runs would depend on their "
                "timing. Leave series out of a study; for a series do the runs one after another with `fedbn-flwr run`"
            )

    def _unusable_names(self) -> Iterator[str]:
        """Yield the names that cannot be folders beside the study's own files."""
        for cell in (*self.cells(), *self.trials()):
            method, *_ = parts = cell.folder(Path()).parts
            for part in parts:
                if len(part) > _LONGEST:
                    yield f"{part[:40]}... would name a folder, with {len(part)} characters; at most {_LONGEST}"
            if Path(method).suffix in _ENDINGS:
                yield f"method {cell.method!r} ends as a file of the study ({', '.join(_ENDINGS)}); rename it"

    def _unusable_papers(self) -> Iterator[str]:
        """Yield the paper's numbers that are outside 0 to 100, where the main metric is a share in percent."""
        for cell in self.cells():
            numbers = self.paper_numbers(name := f"{cell.method}/{cell.split}") if cell.seed == self.seeds[0] else {}
            try:
                share = bool(numbers) and in_percent(headlines(cell.config)[0])
            except ConfigError:  # which is told with the run
                continue
            for domain, (mean, _) in numbers.items():
                if share and mean is not None and not 0 <= mean <= 100:
                    yield f"paper: {name}{domain and f', {domain}'}: {mean:g} is not from 0 to 100, as a share is"

    def _places(self) -> Iterator[tuple[str, Collection[str]]]:
        """Yield each place in the file that has settings, and their keys."""
        yield "base", self.base
        for what, named in (("methods", self.methods), ("splits", self.splits), ("overrides", self.overrides)):
            yield from ((f"{what}.{name}", settings) for name, settings in named.items())
        if self.tune:
            yield from (("tune.base", self.tune.base), ("tune.grid", self.tune.grid))

    def _lists(self) -> Iterator[tuple[str, Sequence[Any]]]:
        yield from (("seeds", self.seeds), ("metrics", self.metrics))
        if self.tune:
            yield "tune.seeds", self.tune.seeds
            yield from ((f"tune.grid: {key}", values) for key, values in self.tune.grid.items())

    def target_of(self, split: str) -> float | None:
        """Return the target of a split, in the unit of the table; None without one."""
        return self.target.get(split) if isinstance(self.target, dict) else self.target

    def paper_numbers(self, name: str) -> dict[str, PaperNumber]:
        """Return the paper's numbers of METHOD/SPLIT: by domain, or one number with the domain ``WHOLE``."""
        stated = self.paper.get(name, {})
        by_domain = stated if isinstance(stated, dict) else {WHOLE: stated}
        return {domain: PaperNumber.read(value) for domain, value in by_domain.items()}

    def to_mapping(self) -> dict[str, Any]:
        """Return the content of a study file that ``load`` reads as this study."""
        return self.model_dump(exclude_defaults=True)

    def names(self) -> list[str]:
        """Return METHOD/SPLIT of every pair, in the order of the file."""
        return [f"{method}/{split}" for method in self.methods for split in self.splits]

    def cells(self) -> Iterator[Cell]:
        """Yield all runs except skipped ones, seed by seed: a stopped study has complete tables for the first seeds."""
        for seed in self.seeds:
            yield from self._cells(seed, {})

    def trials(self) -> Iterator[Cell]:
        """Yield the runs of ``tune``."""
        if self.tune:
            for seed in self.tune.seeds:
                for point in self.tune.points():
                    yield from self._cells(seed, point)

    def _cells(self, seed: int, point: StudySettings) -> Iterator[Cell]:
        more = {**self.tune.base, **point} if self.tune and point else {}
        trial = trial_name(point)
        for split, of_split in self.splits.items():
            for method, of_method in self.methods.items():
                if (name := f"{method}/{split}") not in self.skip:
                    settings = {**of_split, **of_method, **self.overrides.get(name, {}), **more, "seed": seed}
                    yield Cell(method, split, seed, settings, self.base, trial)

    def with_chosen(self, chosen: Mapping[str, StudySettings]) -> Study:
        """Return the study with the settings that ``tune`` chose, by METHOD/SPLIT, and without ``tune``."""
        overrides = {name: {**self.overrides.get(name, {}), **settings} for name, settings in chosen.items()}
        return self.model_copy(update={"overrides": {**self.overrides, **overrides}, "tune": None})


@dataclass(frozen=True)
class Cell:
    """One run of a study: its own settings, and those of ``base``. ``trial`` is its point of ``tune``; "" for none."""

    method: str
    split: str
    seed: int
    settings: Mapping[str, Scalar]
    base: Mapping[str, Scalar]
    trial: str = ""

    @property
    def name(self) -> str:
        """METHOD/SPLIT/seed-N; of a trial tune/METHOD/SPLIT/KEY=VALUE/seed-N."""
        pair = f"{self.method}/{self.split}"
        return f"tune/{pair}/{self.trial}/seed-{self.seed}" if self.trial else f"{pair}/seed-{self.seed}"

    @functools.cached_property
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
        parts = [re.sub(r"[^A-Za-z0-9._+=-]", "_", part) for part in self.name.split("/")]
        return out.joinpath(*(part if part.strip(".") else "_" * max(1, len(part)) for part in parts))  # not "..", ""


def _text_of(error: Mapping[str, Any]) -> str:
    """Return what pydantic says of a value, or the text of this module's own error."""
    own = error.get("ctx", {}).get("error")
    return str(own) if isinstance(own, ValueError) else str(error["msg"]).lower()


def _number(value: Scalar) -> Scalar:
    found = number(value) if isinstance(value, str) else None
    return value if found is None else found


def trial_name(point: StudySettings) -> str:
    """Return the name of a point of ``tune``, such as "learning-rate=0.1"."""
    return ",".join(f"{key}={value}" for key, value in point.items())


def finished(folder: Path) -> bool:
    """Return whether the run of the folder is finished: its summary is written last."""
    return (folder / "summary.json").is_file()


def summary_of(folder: Path) -> dict[str, Any]:
    """Return the summary of a finished run; empty without one."""
    return read_json(folder / "summary.json")


def failure_of(folder: Path) -> dict[str, Any]:
    """Return the error with which the last try of a run ended; empty if there is none."""
    return read_json(folder / FAILED)
