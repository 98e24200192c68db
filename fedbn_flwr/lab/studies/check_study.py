"""The checks of a study before any work, and the selection of runs for a sweep."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import method_of, read_overrides
from fedbn_flwr.lab.config.check_config import of_name
from fedbn_flwr.lab.studies.study import Cell, Study, point_name
from fedbn_flwr.problems import Problem, raise_or_warn

__all__ = ["EVERYTHING", "Selection", "load_study"]


@dataclass(frozen=True)
class Selection:
    """The methods, splits and seeds to run. An empty list selects all of its kind."""

    methods: Sequence[str] = ()
    splits: Sequence[str] = ()
    seeds: Sequence[int] = ()

    def __contains__(self, cell: Cell) -> bool:
        if self.methods and cell.method not in self.methods:
            return False
        if self.splits and cell.split not in self.splits:
            return False
        return not self.seeds or cell.seed in self.seeds

    def of_tuning(self, study: Study) -> Selection:
        """Return the selection of trials of a study, which have other seeds."""
        points = study.tune.points() if study.tune else []
        splits = [
            f"{one}/{point_name(point)}" for one in self.splits for point in points
        ]
        return Selection(self.methods, splits)

    def check(self, study: Study) -> None:
        """Raise ConfigError if a selected name is not in the study."""
        kinds: tuple[tuple[str, Sequence[object], Iterable[object]], ...] = (
            ("method", self.methods, study.methods),
            ("split", self.splits, study.splits),
            ("seed", self.seeds, study.seeds),
        )
        problems: list[Problem] = []
        for kind, selected, of_study in kinds:
            for name in map(str, selected):
                problems += of_name(f"--{kind}", name, [*map(str, of_study)])
        raise_or_warn(problems, "")


EVERYTHING = Selection()


def load_study(path: Path, overrides: Sequence[str] = (), small: bool = False) -> Study:
    """Read a study file and check the config of every run in it.

    Args:
        path: as for ``Study.read``.
        overrides: as for ``Study.read``.
        small: as for ``Study.read``.

    Raises:
        ConfigError: all problems, each with the name of the run.
    """
    study = Study.read(path, overrides, small)
    problems = _problems_of(study, read_overrides(overrides))
    raise_or_warn(
        (replace(one, text=f"study {path}: {one.text}") for one in problems), ""
    )
    return study


def _problems_of(study: Study, given: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems of a study, each with the name of the run.

    Args:
        study: the study, with the settings of the command in its ``base``.
        given: the settings of the command.
    """
    # Check the names in the study.
    yield from _wrong_names(study)
    # Refuse seeds outside the lists of seeds. The last loop below reports a seed in a
    # --set of the command.
    for what, keys in _places(study):
        if "seed" in keys and not (what == "base" and "seed" in given):
            seeds = "tune.seeds" if what.startswith("tune") else "seeds"
            yield Problem(
                "study-seed-unused",
                f"{what}: seed has no effect here; list the seeds under {seeds}",
                "seed",
                "start",
            )

    # Check each run. Then refuse settings of the command that no run uses.
    yield from _problems_of_runs(study)
    for key in given:
        tuned = study.tune is not None and key in study.tune.grid
        if tuned or all(key in cell.settings for cell in study.cells()):
            where = "tune.grid" if tuned else "methods or splits"
            if key == "seed":
                where = f"seeds; use --seed {given[key]} for the runs with this seed"
            yield Problem(
                "study-setting-unused",
                f"--set {key} has no effect: every run has its own, in {where}",
                key,
                "start",
            )


def _wrong_names(study: Study) -> Iterator[Problem]:
    """Yield repeated entries, and names that the study does not contain."""
    for what, values in _lists(study):
        repeated = {str(value) for value in values if values.count(value) > 1}
        if repeated:
            yield Problem(
                "study-lists-twice",
                f"{what}: {', '.join(sorted(repeated))} is listed twice",
                what,
                "start",
            )
    for name in (*study.skip, *study.paper, *study.overrides):
        if name not in study.names():
            yield Problem(
                "study-name-unknown",
                f"'{name}' names no METHOD/SPLIT",
                "skip paper overrides",
                "start",
            )
    if not [*study.cells()]:
        yield Problem(
            "study-skips-all",
            f"skip leaves out every run: {', '.join(study.skip)}",
            "skip",
            "start",
        )


def _problems_of_runs(study: Study) -> Iterator[Problem]:
    """Yield the problems of runs and trials.

    These are two runs with one folder, wrong settings, and trials that cannot be
    compared.
    """
    folders: dict[Path, tuple[str, str]] = {}
    # Many runs may have one problem, so it is named once, with the first of them.
    of_runs: dict[Problem, list[Path]] = {}
    tested: dict[str, dict[bool, str]] = {}
    grids = reversed(study.grids(Path()).items())
    for cell, under in ((one, at) for at, grid in grids for one in grid.cells()):
        # Two runs may get the same folder: method A on split b/c, and method A/b on
        # split c.
        folder, place = cell.folder(under), (cell.method, cell.split)
        first = folders.setdefault(folder, place)
        if first != place:
            yield Problem(
                "study-folder-shared",
                f"method {first[0]!r} on split {first[1]!r} and"
                f" method {cell.method!r} on split {cell.split!r} would share the"
                f" folder {folder}; rename one of them",
                "methods splits",
                "start",
            )
        try:
            config = cell.config
        except ConfigError as error:
            problem = Problem(error.code, str(error), stage="start")
            of_runs.setdefault(problem, []).append(under / cell.name)
            continue

        if under == Path():
            own = method_of(config).tests[0].startswith("personal-own")
            tested.setdefault(cell.split, {}).setdefault(own, cell.method)
        # Trials are compared by their score on validation examples, so each must have
        # some.
        if under != Path() and not config.validation_share:
            problem = Problem(
                "tune-without-validation",
                "tune chooses by validation examples; set validation-share in tune.base",
                "validation-share",
                "start",
            )
            of_runs.setdefault(problem, []).append(under / cell.name)
    for split, methods in tested.items():
        if len(methods) > 1:
            yield Problem(
                "study-tests-differ",
                f"split {split}: {methods[True]} is tested at each site, but"
                f" {methods[False]} on all test examples, so no method will be the best."
                " Set eval-on=personal-own in base",
                "eval-on",
                "start",
                effect="warn",
            )
    for problem, (first_run, *others) in of_runs.items():
        more = f" and {len(others)} more" if others else ""
        yield replace(problem, text=f"{first_run}{more}: {problem.text}")


def _places(study: Study) -> Iterator[tuple[str, Collection[str]]]:
    """Yield (place, keys) of each mapping of settings in the study file."""
    yield "base", study.base
    for kind in ("methods", "splits", "overrides"):
        for name, settings in getattr(study, kind).items():
            yield f"{kind}.{name}", settings
    if study.tune:
        yield "tune.base", study.tune.base
        yield "tune.grid", study.tune.grid


def _lists(study: Study) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield (place, entries) of each list in the study file without repetitions."""
    yield "seeds", study.seeds
    if study.tune:
        yield "tune.seeds", study.tune.seeds
        for key, values in study.tune.grid.items():
            yield f"tune.grid: {key}", values
