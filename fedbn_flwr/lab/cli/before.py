"""``fedbn-flwr list`` and ``partition``: the choices for a run, and its split."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from fedbn_flwr.lab.cli.console import (
    BEFORE,
    ConfigFile,
    Overrides,
    app,
    exit_codes,
    report_own_data,
    say,
)

Kind = Literal["strategies", "norms", "models", "datasets", "partitions"]
"""The registries that ``list`` shows."""


@app.add(BEFORE, "list strategies", name="list")
def list_(kind: Annotated[Kind, typer.Argument(help="What to list.")]) -> None:
    """List the names that a config can use, one line each, with the source."""
    from fedbn_flwr.lab.config.values import rows

    entries = rows(kind)
    wide = max(len(name) for name, _, _ in entries)
    wider = max(len(what) for _, what, _ in entries)
    for name, what, source in entries:
        say(f"{name.ljust(wide)}  {what.ljust(wider)}  {source}")


@app.add(
    BEFORE,
    "partition --set partition=dirichlet --set num-clients=10",
)
def partition(
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Show the number of examples of each client by class, and by domain if any.

    The training and the validation data have separate tables.
    """
    # Check the settings before the import of torch, so that a typing mistake is
    # reported a second earlier.
    from fedbn_flwr.lab.config import Config

    with exit_codes():
        settings = Config.load(config, set_ or [])
    from fedbn_flwr.lab.data import partition_table
    from fedbn_flwr.lab.partitioned.counts import data_warnings
    from fedbn_flwr.lab.partitioned.partitioned_data import (
        count_clients,
        partitioned_data,
    )
    from fedbn_flwr.lab.partitioned.splitting import count_split

    with exit_codes():
        report_own_data(settings)
        for table in count_split(settings):
            say(f"{table.of} examples by {table.what}")
            text = partition_table(table.counts, table.names)
            say(text + "\n")
        split = partitioned_data(settings, count_clients(settings))
        for line in data_warnings(split, settings):
            say(f"warning: {line}", style="yellow")
