"""``fedbn-flwr list``: the names that a config can use."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from fedbn_flwr.lab.cli.console import app, console


class Kind(StrEnum):
    """The registries that ``list`` shows."""

    strategies = "strategies"
    norms = "norms"
    models = "models"
    datasets = "datasets"
    partitions = "partitions"


@app.command(name="list", epilog="Example: fedbn-flwr list strategies")
def list_(kind: Annotated[Kind, typer.Argument(help="What to list.")]) -> None:
    """List the names that a config can use, one line each, with the source."""
    rows: list[tuple[str, str, str]]
    if kind is Kind.strategies:
        from fedbn_flwr.strategies import METHODS

        rows = [(name, method.summary_line, method.source) for name, method in METHODS.items()]
        rows.append(("centralized", "the reference: one loop over all data (`fedbn-flwr run` only)", "-"))
    else:
        rows = [(name, info.summary, info.source) for name, info in _registry(kind).items()]
        if kind is Kind.datasets:
            from fedbn_flwr.lab.data import KINDS

            forms = [form.partition(", ") for form in KINDS.values()]
            rows += [(name, what, "own data") for name, _, what in forms]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, what, source in rows:
        line = f"{name:<{widths[0]}}  {what:<{widths[1]}}  {source}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _registry(kind: Kind) -> Any:
    from fedbn_flwr.lab.data import DATASETS, PARTITIONS
    from fedbn_flwr.lab.models import MODELS
    from fedbn_flwr.norms import NORMS

    return {Kind.norms: NORMS, Kind.models: MODELS, Kind.datasets: DATASETS, Kind.partitions: PARTITIONS}[kind]
