"""``fedbn-flwr list``: the names that a config can use."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from fedbn_flwr.lab.cli.console import app, say

Kind = Literal["strategies", "norms", "models", "datasets", "partitions"]
"""The registries that ``list`` shows."""


@app.command(name="list", epilog="Example: fedbn-flwr list strategies")
def list_(kind: Annotated[Kind, typer.Argument(help="What to list.")]) -> None:
    """List the names that a config can use, one line each, with the source."""
    from fedbn_flwr.lab.data import DATASETS, KINDS, PARTITIONS
    from fedbn_flwr.lab.models import MODELS
    from fedbn_flwr.norms import NORMS
    from fedbn_flwr.strategies import METHODS

    if kind == "strategies":
        rows = [(name, method.summary_line, method.source) for name, method in METHODS.items()]
        rows.append(("centralized", "the reference: one loop over all data (`fedbn-flwr run` only)", "-"))
    else:
        registries: dict[str, Any] = {"norms": NORMS, "models": MODELS, "datasets": DATASETS, "partitions": PARTITIONS}
        rows = [(name, info.summary, info.source) for name, info in registries[kind].items()]
    if kind == "datasets":
        for form in KINDS.values():
            name, _, what = form.partition(", ")
            rows.append((name, what, "own data"))
    names, texts, _ = zip(*rows, strict=True)
    for name, what, source in rows:
        say(f"{name.ljust(len(max(names, key=len)))}  {what.ljust(len(max(texts, key=len)))}  {source}")
