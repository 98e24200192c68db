"""``fedbn-flwr partition``: the split of the data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbn_flwr.lab.cli.console import app, console, exit_codes, report_own_data, say


@app.command(epilog="Example: fedbn-flwr partition --set partition=dirichlet --set num-clients=10 --out split.png")
def partition(
    config: Annotated[Path | None, typer.Argument(help="YAML file of settings; without it, the defaults.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value, replaces the file's; repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="Picture (PNG) of classes by clients to write; a new file.")] = None,
) -> None:
    """Show the split of the training and validation data: each client's examples by class, and by domain if any."""
    from fedbn_flwr.lab.config import Config
    from fedbn_flwr.lab.data import partition_table
    from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data
    from fedbn_flwr.lab.partitioned.report import classes_without_client
    from fedbn_flwr.lab.partitioned.splitting import count_split, draw_split

    with exit_codes():
        settings = Config.load(config, set_ or [])
        warnings = report_own_data(settings)
        tables = count_split(settings)
        for table in tables:
            console.print(f"{table.of} examples by {table.what}")
            text = partition_table(table.counts, table.names)
            say(text + "\n")
        split = partitioned_data(settings, count_clients(settings))
        for line in (*classes_without_client(split, settings), *warnings):
            say(f"warning: {line}", style="yellow")
        if out:
            draw_split(settings, tables[0], out)
            say(f"picture: {out.absolute()}")
