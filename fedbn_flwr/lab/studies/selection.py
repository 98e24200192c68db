"""The part of a study that a sweep does now: some methods, splits or seeds of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.studies.cell import Cell
from fedbn_flwr.lab.studies.study import Study

__all__ = ["EVERYTHING", "Selection"]


@dataclass(frozen=True)
class Selection:
    """Names of methods and splits, and seeds, of a study; an empty one selects all of its kind.

    The trials of ``tune`` have seeds of their own, which ``seeds`` does not limit.
    """

    methods: Sequence[str] = ()
    splits: Sequence[str] = ()
    seeds: Sequence[int] = ()

    def __contains__(self, cell: Cell) -> bool:
        pair = cell.method in (self.methods or [cell.method]) and cell.split in (self.splits or [cell.split])
        return pair and (bool(cell.trial) or cell.seed in (self.seeds or [cell.seed]))

    def check(self, study: Study) -> None:
        """Raise ConfigError if something selected is not in the study, or the study skips all of it."""
        problems = [*self._unknown(study)]
        if not problems and not any(cell in self for cell in study.cells()):
            problems = [f"study {study.name!r}: skip leaves out every run that is selected: {', '.join(study.skip)}"]
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
                    yield f"--{kind} {name}: study {study.name!r} has {', '.join(map(str, of_study))}"


EVERYTHING = Selection()
