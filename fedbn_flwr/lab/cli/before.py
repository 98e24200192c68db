"""``fedbn-flwr list`` and ``partition``: the choices for a run, and its split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from fedbn_flwr.lab.cli.console import (
    BEFORE,
    ConfigFile,
    Overrides,
    app,
    exit_codes,
    say,
)

Kind = Literal["strategies", "norms", "models", "datasets", "partitions"]
"""The registries that ``list`` shows."""


@app.add(BEFORE, "list strategies", name="list")
def list_(kind: Annotated[Kind, typer.Argument(help="What to list.")]) -> None:
    """List the names that a config can use, one line each, with the source."""
    entries = _entries(kind)
    wide = max(len(name) for name, _, _ in entries)
    wider = max(len(what) for _, what, _ in entries)
    for name, what, source in entries:
        say(f"{name.ljust(wide)}  {what.ljust(wider)}  {source}")


def _entries(kind: Kind) -> list[tuple[str, str, str]]:
    """Return (name, summary, source) of each entry of a registry."""
    from fedbn_flwr.lab.config import CENTRALIZED
    from fedbn_flwr.lab.data import DATASETS, FUNCTION_FORM, KINDS, PARTITIONS
    from fedbn_flwr.lab.models import MODELS
    from fedbn_flwr.norms import NORMS
    from fedbn_flwr.strategies import METHODS

    if kind == "strategies":
        about = "the reference: FedAvg with one client, which has all data"
        methods = [
            (name, one.summary_line, one.source) for name, one in METHODS.items()
        ]
        return [*methods, (CENTRALIZED, about, "-")]
    registries: dict[str, Mapping[str, Any]] = {
        "norms": NORMS,
        "models": MODELS,
        "datasets": DATASETS,
        "partitions": PARTITIONS,
    }
    entries = [
        (name, info.summary, info.source) for name, info in registries[kind].items()
    ]
    if kind == "datasets":
        for form in (*KINDS.values(), FUNCTION_FORM):
            name, _, what = form.partition(", ")
            entries.append((name, what, "own data"))
    return entries


@app.add(
    BEFORE,
    "partition --set partition=dirichlet --set num-clients=10",
)
def partition(
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Show the number of examples of each client, by class if there are classes."""
    from fedbn_flwr.lab.config import Config

    with exit_codes():
        settings = Config.load(config, set_ or [])
    from fedbn_flwr.lab.partitioned.counts import data_text, data_warnings
    from fedbn_flwr.lab.partitioned.partitioned_data import (
        count_clients,
        partitioned_data,
    )

    with exit_codes():
        split = partitioned_data(settings, count_clients(settings))
        say(data_text(split, settings, most=len(split.train)))
        for line in data_warnings(split, settings):
            say(f"warning: {line}", style="yellow")
