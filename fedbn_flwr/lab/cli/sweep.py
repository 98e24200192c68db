"""``fedbn-flwr sweep``: a grid of runs."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress, Task, TaskID

from fedbn_flwr.errors import ConfigError, RunFailedError
from fedbn_flwr.lab.cli.console import (
    TRAIN,
    EngineChoice,
    Scores,
    app,
    bars,
    complaints,
    exit_codes,
    interrupt,
    quiet_flower,
    say,
)
from fedbn_flwr.lab.cli.tables import show_table

if TYPE_CHECKING:
    import pandas as pd

    from fedbn_flwr.lab.studies.study import Cell
    from fedbn_flwr.lab.studies.study_checks import Selection


@app.add(TRAIN, "sweep apps/main/recipes/demo.yaml --out runs/digits --parallel 2")
def sweep(
    study: Annotated[Path, typer.Argument(help="YAML file: base, methods, splits, seeds, paper, target, tune.")],
    out: Annotated[Path, typer.Option(help="Folder of all runs; finished ones in it are skipped.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value, replaces the study's base.")] = None,
    engine: Annotated[EngineChoice, typer.Option(help="Where the clients run.")] = "in-process",
    parallel: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time, each a process. Default: the cores, if the work pays.")
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option(min=0.1, help="Memory for all runs together. Default: what is free.")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="HOST:PORT of a running Ray cluster that does the runs.")
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help="Only runs of this method of the study; repeatable.")] = None,
    split: Annotated[list[str] | None, typer.Option(help="Only runs on this split of the study; repeatable.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Only runs with this seed of the study; repeatable.")] = None,
) -> None:
    """Do a grid of runs, methods x splits x seeds, and write one table with mean and deviation."""
    from fedbn_flwr.lab.config import read_overrides
    from fedbn_flwr.lab.config.yaml_text import read_yaml

    with exit_codes():
        _check_options(engine, parallel, memory_gib, ray_address)
        read_yaml(study, "study")
        read_overrides(set_ or [])
    from fedbn_flwr.lab.studies.one_run import is_done
    from fedbn_flwr.lab.studies.parallel import default_parallel, in_parallel
    from fedbn_flwr.lab.studies.study_checks import Selection, load_study
    from fedbn_flwr.lab.studies.sweep import in_series
    from fedbn_flwr.lab.studies.sweep import sweep as launch

    with exit_codes():
        quiet_flower()
        grid = load_study(study, set_ or [])
        selection = Selection(method or (), split or (), seed or ())
        selection.check(grid)
        selected = [cell for cell in (*grid.trials(), *grid.cells()) if cell in selection]
        left = [cell for cell in selected if not is_done(cell, out)]
        if parallel is None:
            parallel = default_parallel(left) if engine == "in-process" and not ray_address else 1
        several = ray_address or parallel > 1
        if memory_gib and not several:
            raise ConfigError("--memory-gib is for several runs at a time: state --parallel, too.")
        runner = in_parallel(parallel, memory_gib or 0.0, ray_address) if several else in_series(engine)

        failed: RunFailedError | None = None
        table: pd.DataFrame | None = None  # of lost trials there is none
        try:
            with interrupt(lambda: _saved(out, selected, selection)), bars() as progress:
                table = launch(grid, out, runner, Display(progress, grid.name), selection)
        except RunFailedError as error:
            table, failed = error.result, error
        if table is not None:
            show_table(table, grid.name)
        say()
        say(f"results: {out.absolute()}")
        say(f"next: fedbn-flwr report {shlex.quote(str(out))}")
        if failed:
            raise failed


def _check_options(
    engine: EngineChoice, parallel: int | None, memory_gib: float | None, ray_address: str | None
) -> None:
    if ray_address and (parallel or memory_gib):
        raise ConfigError("--parallel and --memory-gib are for this machine; leave them out with --ray-address.")
    if engine == "simulation" and (ray_address or (parallel or 1) > 1):
        raise ConfigError("--engine simulation does one run at a time: leave out --parallel and --ray-address.")


def _saved(out: Path, selected: Sequence[Cell], selection: Selection) -> str:
    """Return what an interrupted sweep leaves in its folder."""
    from fedbn_flwr.lab.files import STUDY_FILE
    from fedbn_flwr.lab.studies.one_run import is_done
    from fedbn_flwr.lab.studies.study import Study

    trials = [cell for cell in selected if cell.trial]
    cells, what = trials, "trials of tune, before the runs"
    if not trials:
        cells, what = [*selected], "runs"
    elif all(is_done(cell, out) for cell in trials):  # so the folder has the study with what they chose
        tuned = [cell for cell in Study.read(out / STUDY_FILE).cells() if cell in selection]
        cells, what = [*trials, *tuned], "runs"
    return (
        f"Finished in {out}: {sum(is_done(cell, out) for cell in cells)} of {len(cells)} {what}.\nThe same "
        "command goes on with the others, and with an unfinished run from its last checkpoint."
    )


class Display:
    """All runs of a study: a bar over the rounds of all of them, and one for each run that is going on.

    Rounds that were done before, or that will never be done, leave the bar of all: they say nothing of the speed.
    A line is printed for each run that ended, so that a log file has them too.
    """

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress, self._name = progress, name
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, float] = {}

    def plan(self, cells: Sequence[Any], left: Sequence[Any]) -> None:
        """Show the bar over all rounds of these runs."""
        self._left, self._ended, self._failed = len(left), 0, 0
        self._rounds = {cell.name: cell.config.num_server_rounds for cell in left}
        what = f"tuning {self._name}" if cells and cells[0].trial else self._name
        self._what = f"{what}, {len(cells)} runs"
        self._all = self._progress.add_task(self._what, total=sum(self._rounds.values()) or 1, shown="")
        self._count()

    def begin(self, cell: Any) -> Callable[[Any], None]:
        """Show the bar of a run; return what moves it."""
        from fedbn_flwr.lab.config import data_of

        scores, rounds = Scores(data_of(cell.config).task.score), self._rounds[cell.name]
        task = self._tasks[cell.name] = self._progress.add_task("  " + cell.name, total=rounds, shown="")
        self._started[cell.name] = time.monotonic()

        def on_round(line: Any) -> None:
            self._advance(task, line["round"])
            self._progress.update(task, shown=scores.after(line))

        return on_round

    def end(self, cell: Any, error: str) -> None:
        """Print the end of a run in place of its bar."""
        self._ended, self._failed = self._ended + 1, self._failed + bool(error)
        scores, left = "", self._rounds[cell.name]
        if task := self._tasks.pop(cell.name, None):
            ended = self._of(task)
            scores, left = ended.fields["shown"], left - int(ended.completed)
            self._progress.remove_task(task)
        self._leave_out(left)
        seconds = time.monotonic() - self._started.get(cell.name, time.monotonic())
        outcome = f"failed: {error}" if error else f"{scores}, {seconds:.0f} s"
        text = f"{self._ended}/{self._left} {cell.name}: {outcome}"
        say(text, "red" if error else None, complaints)
        self._count()

    def _advance(self, task: TaskID, server_round: int) -> None:
        before = self._of(task).completed
        self._progress.update(task, completed=server_round)
        if server_round > before:
            self._leave_out(server_round - before - 1)
            self._progress.advance(self._all)

    def _leave_out(self, rounds: float) -> None:
        if rounds:  # with a new total rich forgets the speed so far
            self._progress.update(self._all, total=(self._of(self._all).total or 0) - rounds)

    def _of(self, task: TaskID) -> Task:
        return self._progress.tasks[self._progress.task_ids.index(task)]

    def _count(self) -> None:
        failed = f", {self._failed} failed" if self._failed else ""
        shown = f"{self._ended} of {self._left} done{failed}" if self._left else "nothing is left to do"
        self._progress.update(self._all, shown=shown)
