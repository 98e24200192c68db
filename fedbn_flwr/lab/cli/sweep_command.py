"""``fedbn-flwr sweep``: a grid of runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from fedbn_flwr.errors import RunFailedError
from fedbn_flwr.lab.cli.console import (
    TRAIN,
    Scores,
    app,
    bars,
    complaints,
    exit_codes,
    interrupt,
    quiet_flower,
    say,
    say_table,
)

if TYPE_CHECKING:
    import pandas as pd

    from fedbn_flwr.lab.studies.study import Cell


@app.add(TRAIN, "sweep apps/main/recipes/demo.yaml --out runs/digits --parallel 2")
def sweep(
    study: Annotated[
        Path,
        typer.Argument(
            help="YAML file: base, methods, splits, seeds, paper, tune, small;"
            " or which-method, the study in the package."
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder of all runs; finished runs in it are skipped.")
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="KEY=VALUE that overrides the study's base; repeatable."
        ),
    ] = None,
    small: Annotated[
        bool, typer.Option("--small", help="Use the study's changes under small.")
    ] = False,
    parallel: Annotated[
        int, typer.Option(min=1, help="Number of runs at a time, each on its own core.")
    ] = 1,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Worker processes of a run, as for the command run; with --parallel,"
            " 0.",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Try the study: so many rounds in each run, no trials."
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Only runs of this method of the study; repeatable."),
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(help="Only runs on this split of the study; repeatable."),
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(help="Only runs with this seed of the study; repeatable."),
    ] = None,
) -> None:
    """Do a grid of runs (methods x splits x seeds) and write one table.

    The table has the mean and the deviation over the seeds.
    """
    from fedbn_flwr.lab import studies
    from fedbn_flwr.lab.config import read_overrides
    from fedbn_flwr.lab.config.yaml_text import read_yaml

    # Read the file before the import of torch, so that an unreadable file is reported a
    # second earlier.
    with exit_codes():
        shipped = Path(studies.__file__).parent / f"{study}.yaml"
        if not study.exists() and shipped.is_file():
            study = shipped
        read_yaml(study, "study")
        read_overrides(set_ or [])
    from fedbn_flwr.lab.report.words import of_ranking
    from fedbn_flwr.lab.results.files import STUDY_FILE, command
    from fedbn_flwr.lab.results.folder import trusting
    from fedbn_flwr.lab.studies.check_study import Selection, load_study
    from fedbn_flwr.lab.studies.parallel import in_parallel
    from fedbn_flwr.lab.studies.study import Study
    from fedbn_flwr.lab.studies.sweep import in_series
    from fedbn_flwr.lab.studies.sweep import sweep as launch
    from fedbn_flwr.lab.studies.tables import answers, outcomes

    with exit_codes():
        quiet_flower()
        grid = load_study(study, set_ or [], small)
        if rounds:
            grid = grid.shortened(rounds)
        selection = Selection(method or (), split or (), seed or ())
        in_turn = partial(in_series, workers=workers)
        runner = in_parallel(parallel) if parallel > 1 else in_turn

        # A failed run does not stop the other runs. After the last run, the command
        # ends with an error.
        failed: RunFailedError | None = None
        saved = (
            f"Finished runs in {out} are kept. The same command resumes the others from"
            " their last checkpoints."
        )
        try:
            with interrupt(lambda: saved), bars() as progress:
                table = launch(grid, out, runner, Display(progress), selection)
        except RunFailedError as error:
            # If trials of the tuning failed, the error has no table.
            table, failed = error.result, error
        if table is not None:
            _show(table, grid.name)
            done = Study.read(out / STUDY_FILE)
            found = outcomes(done, out)
            for name, ranked in answers(done, found).items():
                prefix = f"{name}: " if len(found) > 1 else ""
                say(prefix + " ".join(of_ranking(ranked)))
        say(
            f"\nresults: {out.absolute()} (models, tests and lines of each run; no"
            f" checkpoints)\nnext: {command('report', out, *trusting(out))}"
        )
        if failed:
            raise failed


def _show(table: pd.DataFrame, title: str) -> None:
    """Print the table."""
    # Hide the column if all rows have the same split.
    if "split" in table and table["split"].nunique() == 1:
        table = table.drop(columns="split")
    say(f"\n{title}", style="bold")
    say_table(table.columns, table.to_numpy().tolist())


_MINUTE = 60


class Display:
    """A progress bar over the runs of a study, and a line for each run that ended.

    If the output goes to a log file, the lines are the record of the runs.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._started: dict[str, float] = {}

    def plan(self, name: str, left: int) -> None:
        """Show the bar over the runs that are left to do."""
        self._left, self._ended, self._shown = left, 0, ""
        self._bar = self._progress.add_task(name, total=left, shown="")

    def begin(self, cell: Cell) -> Callable[[Any], None]:
        """Return the function that shows the rounds of a run in this process."""
        from fedbn_flwr.lab.config import data_of

        self._started[cell.name] = self._said = time.monotonic()
        scores = Scores(data_of(cell.config).task.score)

        def on_round(line: Any) -> None:
            self._shown = scores.after(line)
            text = f"{cell.name}, round {line['round']}: {self._shown}"
            self._progress.update(self._bar, shown=text)
            # A log has no bar, so a long run has a line each minute.
            if not complaints.is_terminal and time.monotonic() - self._said > _MINUTE:
                self._said = time.monotonic()
                say(text, on=complaints)

        return on_round

    def end(self, cell: Cell, error: str) -> None:
        """Print the scores or the error of a run that ended, and move the bar."""
        self._ended += 1
        self._progress.advance(self._bar)
        seconds = time.monotonic() - self._started[cell.name]
        outcome, colour = f"{self._shown} {seconds:.0f} s".strip(), None
        if error:
            outcome, colour = f"failed: {error}", "red"
        say(f"{self._ended}/{self._left} {cell.name}: {outcome}", colour, complaints)
        self._shown = ""
