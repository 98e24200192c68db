"""A study, checked before any work: its names, settings and numbers, and the part of it
that a sweep does now.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import read_overrides
from fedbn_flwr.lab.studies.study import Cell, Study
from fedbn_flwr.strategies import FedBS

__all__ = ["EVERYTHING", "Selection", "load_study"]


@dataclass(frozen=True)
class Selection:
    """Names of methods and splits, and seeds, of a study; an empty one selects all of
    its kind.

    The trials of ``tune`` have seeds of their own, which ``seeds`` does not limit.
    """

    methods: Sequence[str] = ()
    splits: Sequence[str] = ()
    seeds: Sequence[int] = ()

    def __contains__(self, cell: Cell) -> bool:
        pair = cell.method in (self.methods or [cell.method]) and cell.split in (
            self.splits or [cell.split]
        )
        return pair and (bool(cell.trial) or cell.seed in (self.seeds or [cell.seed]))

    def check(self, study: Study) -> None:
        """Raise ConfigError if something selected is not in the study, or the study
        skips all of it.
        """
        problems = [*self._unknown(study)]
        if not problems and not any(cell in self for cell in study.cells()):
            problems = [
                f"study {study.name!r}: skip leaves out every run that is selected:"
                f" {', '.join(study.skip)}"
            ]
        if problems:
            raise ConfigError("\n".join(problems))

    def _unknown(self, study: Study) -> Iterator[str]:
        kinds: tuple[tuple[str, Sequence[object], Sequence[object]], ...] = (
            ("method", self.methods, [*study.methods]),
            ("split", self.splits, [*study.splits]),
            ("seed", self.seeds, study.seeds),
        )
        for kind, selected, of_study in kinds:
            for name in selected:
                if name not in of_study:
                    yield (
                        f"--{kind} {name}: study {study.name!r} has"
                        f" {', '.join(map(str, of_study))}"
                    )


EVERYTHING = Selection()


def load_study(path: Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study file and check the config of every run in it.

    Args:
        path: as for ``Study.read``.
        overrides: as for ``Study.read``.

    Raises:
        ConfigError: all problems, each with the name of the run.
    """
    study = Study.read(path, overrides)
    if problems := [
        f"study {path}: {problem}"
        for problem in _problems_of(study, read_overrides(overrides))
    ]:
        raise ConfigError("\n".join(problems))
    return study


def _problems_of(study: Study, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong, with the name of the run; ``given`` are the settings of the
    command.
    """
    yield from _wrong_names(study)
    yield from _unusable_names(study)
    for what, keys in _places(study):
        # of the command: see below
        if "seed" in keys and not (what == "base" and "seed" in given):
            yield (
                f"{what}: seed has no effect here; list the seeds under"
                f" {'tune.' * what.startswith('tune')}seeds"
            )
    yield from _problems_of_runs(study)
    for key in given:
        if all(key in cell.settings for cell in study.cells()):
            of_seed = f"seeds; --seed {given[key]} does the runs of that one"
            where = of_seed if key == "seed" else "methods or splits"
            yield f"--set {key} has no effect: every run has its own, in {where}"


def _wrong_names(study: Study) -> Iterator[str]:
    """Yield what is listed twice, and names that are none of the study."""
    for what, values in _lists(study):
        if repeated := {str(value) for value in values if values.count(value) > 1}:
            yield f"{what}: {', '.join(sorted(repeated))} is listed twice"
    for name in (*study.skip, *study.paper, *study.overrides):
        if name not in study.names():
            yield f"'{name}' names no METHOD/SPLIT"
    if not any(True for _ in study.cells()):
        yield f"skip leaves out every run: {', '.join(study.skip)}"


def _problems_of_runs(study: Study) -> Iterator[str]:
    """Yield folders that two runs would share, settings that are wrong, and runs that
    are tied together.
    """
    folders: dict[Path, tuple[str, str, str, int]] = {}
    tied: dict[str, str] = {}
    shares: dict[str, float] = {}  # of the runs, which come before the trials
    for cell in (*study.cells(), *study.trials()):
        folder, place = (
            cell.folder(Path()),
            (cell.method, cell.split, cell.trial, cell.seed),
        )
        first = folders.setdefault(folder, place)
        if first != place:
            twins = [
                f"method {method!r} on split {split!r}"
                for method, split, *_ in (first, place)
            ]
            yield (
                f"{twins[0]} and {twins[1]} would share the folder {folder}; rename one"
                " of them"
            )
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
            yield (
                f"{cell.name}: tune chooses by validation examples; set"
                " validation-share in tune.base"
            )
        elif config.strategy == FedBS.name and not shares.get(pair):
            yield (
                f"{cell.name}: with validation-share fedbs weighs by the validation"
                " loss, without by the training loss; set validation-share for the"
                " runs, too, so that trials and runs do the same"
            )
    if tied:
        one, more = next(iter(tied)), len(tied) - 1
        yield (
            f"{one}{f' and {more} other runs' if more else ''}: series={tied[one]} ties"
            " runs together: a run starts with the parts that clients kept in the run"
            " before, and parallel runs would depend on their timing. Leave series out"
            " of a study; for a series do the runs one after another with `fedbn-flwr"
            " run`"
        )


def _unusable_names(study: Study) -> Iterator[str]:
    """Yield the methods whose folders would lie in place of the study's own files."""
    for method in study.methods:
        if Path(method).suffix in (".csv", ".html", ".md", ".yaml"):
            yield f"method {method!r} ends as a file of the study; rename it"


def _places(study: Study) -> Iterator[tuple[str, Collection[str]]]:
    """Yield each place in the file that has settings, and their keys."""
    yield "base", study.base
    for what, named in (
        ("methods", study.methods),
        ("splits", study.splits),
        ("overrides", study.overrides),
    ):
        yield from ((f"{what}.{name}", settings) for name, settings in named.items())
    if study.tune:
        yield from (("tune.base", study.tune.base), ("tune.grid", study.tune.grid))


def _lists(study: Study) -> Iterator[tuple[str, Sequence[Any]]]:
    yield from (("seeds", study.seeds), ("metrics", study.metrics))
    if study.tune:
        yield "tune.seeds", study.tune.seeds
        yield from (
            (f"tune.grid: {key}", values) for key, values in study.tune.grid.items()
        )
