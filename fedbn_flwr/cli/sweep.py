"""``fedbn-flwr sweep``: a grid of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbn_flwr.cli.console import Engine, app, console, exit_codes, interrupt, progress, quiet_flower
from fedbn_flwr.errors import RunFailedError


@app.command(epilog="Example: fedbn-flwr sweep apps/main/recipes/demo.yaml --out runs/digits")
def sweep(
    study: Annotated[Path, typer.Argument(help="YAML file: base, methods, splits, seeds, paper.")],
    out: Annotated[Path, typer.Option(help="Folder of all runs; finished ones in it are skipped.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value, replaces the study's base.")] = None,
    engine: Annotated[Engine, typer.Option(help="Where the clients run.")] = Engine.in_process,
) -> None:
    """Do a grid of runs, methods x splits x seeds, and write a table with mean and standard deviation."""
    from fedbn_flwr.experiment.study import Study, finished
    from fedbn_flwr.experiment.sweep import sweep as launch

    with exit_codes():
        quiet_flower()
        grid = Study.load(study, set_ or [])
        folders = [cell.folder(out) for cell in grid.cells()]
        total = len(folders)

        def saved() -> str:
            return (
                f"Finished in {out}: {sum(map(finished, folders))} of {total} runs.\nThe same command goes on with the "
                "others, and with an unfinished run from its last checkpoint."
            )

        failed: RunFailedError | None = None
        try:
            with interrupt(saved), progress(total, grid.name) as follow:
                table = launch(
                    grid,
                    out,
                    engine.value,
                    lambda cell, index, _: follow.cell(cell.name, index, cell.config.learning_task().score),
                )
                follow.cell("done", total)
        except RunFailedError as error:
            table, failed = error.result, error
        console.print(table, markup=False, highlight=False, soft_wrap=True)
        console.print(f"results: {out.absolute()}", highlight=False, soft_wrap=True)
        if failed:
            raise failed
