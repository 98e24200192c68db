"""``fedbn-flwr evaluate``: the model of a run on other data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from fedbn_flwr.lab.cli.console import app, console, exit_codes, say

PartChoice = Literal["train", "test", "all"]
"""The examples that ``evaluate`` uses: ``finished_runs.examples.DataPart``, without its import."""


@app.command(epilog="Example: fedbn-flwr evaluate runs/fedbn --dataset usps --set data-dir=/data --bn adapt --out usps")
def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    dataset: Annotated[str, typer.Option(help="The data; `fedbn-flwr list datasets`.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key=value of the data, test-bn-...; repeatable.")
    ] = None,
    bn: Annotated[
        str,
        typer.Option(
            help="averaged; own:CLIENT; adapt: statistics of the new inputs; or test-time BatchNorm, for each group by "
            "itself: batch, mix, momentum, full. Default: the global BN."
        ),
    ] = "",
    part: Annotated[
        PartChoice | None,
        typer.Option(help="Which examples. Default: all of new own data without a split of their own, else test."),
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(help="State folder of this site: its own model.")] = None,
    out: Annotated[Path | None, typer.Option(help="New folder for predictions.csv and metrics.json.")] = None,
) -> None:
    """Evaluate the model of a run on any data: a table of its metrics, and its predictions."""
    from fedbn_flwr.lab.config import read_overrides
    from fedbn_flwr.lab.finished_runs.evaluate import evaluate_run

    with exit_codes():
        data = {**read_overrides(set_ or []), "dataset": dataset}
        what, rows = evaluate_run(run, data, bn, part or "", out, state_dir)
        say(f"model: {what}")
        metrics = list(rows[0].result.named())
        table = Table("data", "BN statistics", "examples", *metrics, box=None)
        for column in table.columns:
            column.overflow = "fold"
        for row in rows:
            values = [f"{value:.4f}" for value in row.result.named().values()]
            table.add_row(row.data, row.statistics, str(row.result.num_examples), *values)
        console.print(table)
        console.print("Each figure is pooled: over all these examples together.")
        if out:
            say(f"results: {out.absolute()}")
