"""``fedbn-flwr list``, ``inspect`` and ``partition``: what a run can use, what it
sends, and how it splits its data.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from fedbn_flwr.errors import unknown_name
from fedbn_flwr.lab.cli.console import BEFORE, app, exit_codes, report_own_data, say

if TYPE_CHECKING:
    from fedbn_flwr.batchnorm.parts import Part
    from fedbn_flwr.lab.runs.inspection import Inspection


Kind = Literal["strategies", "norms", "models", "datasets", "partitions"]
"""The registries that ``list`` shows."""


@app.add(BEFORE, "list strategies", name="list")
def list_(kind: Annotated[Kind, typer.Argument(help="What to list.")]) -> None:
    """List the names that a config can use, one line each, with the source."""
    from fedbn_flwr.lab.config.names import rows

    names, texts, _ = zip(*rows(kind), strict=True)
    for name, what, source in rows(kind):
        say(
            f"{name.ljust(len(max(names, key=len)))} "
            f" {what.ljust(len(max(texts, key=len)))}  {source}"
        )


@app.add(BEFORE, "inspect --model resnet20 --strategy silobn --num-clients 5")
def inspect(
    model: Annotated[
        str, typer.Option(help="Model; `fedbn-flwr list models`.")
    ] = "resnet20",
    strategy: Annotated[
        str, typer.Option(help="Strategy; `fedbn-flwr list strategies`.")
    ] = "fedavg",
    norm: Annotated[
        str, typer.Option(help="Normalisation; `fedbn-flwr list norms`.")
    ] = "batch",
    num_clients: Annotated[int, typer.Option(min=1, help="Clients per round.")] = 5,
    dataset: Annotated[
        str, typer.Option(help="Data set; gives the model's input and classes.")
    ] = "cifar10",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value of the method, rounds, ..."),
    ] = None,
) -> None:
    """Show a model's BN layers, and what a strategy shares, keeps and sends per round."""
    from fedbn_flwr.lab.config import Config, read_overrides
    from fedbn_flwr.server.methods.method_params import PARAMS

    with exit_codes():
        given = read_overrides(set_ or [])
        strategy = str(given.get("strategy", strategy))
        if strategy not in PARAMS:
            raise unknown_name("strategy", strategy, PARAMS)
        settings = Config.make(
            {
                "model": model,
                "norm": norm,
                "dataset": dataset,
                **given,
                "strategy": strategy,
            }
        )
    from fedbn_flwr.lab.runs.inspection import inspect_model
    from fedbn_flwr.lab.setup import initialise, make_model
    from fedbn_flwr.training.settings import share_of

    with exit_codes():
        if given.get("num-clients"):
            num_clients = max(
                1, share_of(settings.fraction_train, settings.num_clients)
            )
        built = make_model(settings)
        loaded = initialise(built, settings)
        inspection = inspect_model(built, strategy, num_clients, settings)
        named = (
            f"{settings.model} (norm={settings.norm}), {settings.title}, {num_clients}"
            " clients"
        )
        say(f"{named}: {len(inspection.parts.layers)} BN layers")
        say(_layers(inspection))
        for line in _costs(inspection):
            say(line)
        for warning in inspection.warnings:
            say(f"warning: {warning}", style="yellow")
        for line in loaded.lines() if loaded else ():
            say(line)


def _layers(inspection: Inspection) -> Table:
    """Return a row for each BN layer and one for all other entries: what happens to
    them, and how many they are.
    """
    from fedbn_flwr.batchnorm.parts import Part

    floats, counters = inspection.floats, inspection.counters
    use = {part: _use(inspection, part) for part in floats}
    table = Table(
        "BN layer", "gamma and beta", "running statistics", "floats", box=None
    )
    for layer in inspection.parts.layers:
        affine = statistics = "-"
        if "weight" in layer.entries:
            trains = layer.entries["weight"] not in inspection.frozen
            affine = use[Part.AFFINE] if trains else f"{use[Part.AFFINE]}; not trained"
        if "running_mean" in layer.entries:
            moves = layer.path not in inspection.fixed
            statistics = (
                use[Part.STATISTICS]
                if moves
                else f"{use[Part.STATISTICS]}; in eval mode"
            )
        of_layer = [
            name
            for name in layer.entries.values()
            if inspection.parts.part_of[name] != Part.COUNTERS
        ]
        size = sum(inspection.sizes[name] for name in of_layer)
        table.add_row(
            layer.path or "(the model itself)", affine, statistics, f"{size:,}"
        )
    table.add_row(
        "all other layers", f"({use[Part.REST]})", "", f"{floats[Part.REST]:,}"
    )
    table.add_row(
        "sum",
        f"{floats[Part.AFFINE]:,}",
        f"{floats[Part.STATISTICS]:,}",
        f"{sum(floats.values()):,}",
    )
    if counters[Part.COUNTERS]:
        table.add_row(
            "counters of batches",
            f"({use[Part.COUNTERS]})",
            "",
            f"{counters[Part.COUNTERS]:,} integers",
        )
    return table


def _use(inspection: Inspection, part: Part) -> str:
    """Return what happens to the entries of a part."""
    words = ["stays with the client" if part in inspection.local else "shared"]
    if inspection.synchronised and part == "statistics":
        words.append("synchronised in each step")
    if part in inspection.phases[-1].frozen:
        words.append("frozen after T*")
    if inspection.reestimation and part == "statistics":
        words.append("re-estimated before a test")
    return ", ".join(words)


def _costs(inspection: Inspection) -> Iterator[str]:
    """Yield what a round of each phase costs, and the whole run."""
    for phase in filter(None, (*inspection.phases, inspection.reestimation)):
        cost, rounds = phase.traffic, "?" if phase.rounds is None else phase.rounds
        yield (
            f"{phase.name} ({rounds} rounds), each: {cost.exchanges} exchanges,"
            f" {cost.megabytes:.4f} MB of floats: {cost.down:,} bytes down, {cost.up:,}"
            f" up; counters {cost.counters_down:,} down, {cost.counters_up:,} up"
        )
    if all(phase.rounds is not None for phase in inspection.phases):
        total = inspection.total()
        yield (
            f"all rounds: {total.exchanges:,} exchanges, {total.megabytes / 1024:.4f}"
            " GB of floats"
        )
    if inspection.frozen:
        number = len(inspection.frozen)
        yield (
            f"{number} parameters are frozen. They are equal on all clients, and sent"
            " anyway."
        )


@app.add(
    BEFORE, "partition --set partition=dirichlet --set num-clients=10 --out split.png"
)
def partition(
    config: Annotated[
        Path | None,
        typer.Argument(help="YAML file of settings; without it, the defaults."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value, replaces the file's; repeatable."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Picture (PNG) of classes by clients to write; a new file."),
    ] = None,
) -> None:
    """Show the split of the training and validation data: each client's examples by
    class, and by domain if any.
    """
    from fedbn_flwr.lab.config import Config

    with exit_codes():
        settings = Config.load(config, set_ or [])
    from fedbn_flwr.lab.data import partition_table
    from fedbn_flwr.lab.partitioned.counts import data_warnings
    from fedbn_flwr.lab.partitioned.partitioned_data import (
        count_clients,
        partitioned_data,
    )
    from fedbn_flwr.lab.partitioned.splitting import count_split, draw_split

    with exit_codes():
        report_own_data(settings)
        tables = count_split(settings)
        for table in tables:
            say(f"{table.of} examples by {table.what}")
            text = partition_table(table.counts, table.names)
            say(text + "\n")
        split = partitioned_data(settings, count_clients(settings))
        for line in data_warnings(split, settings):
            say(f"warning: {line}", style="yellow")
        if out:
            draw_split(settings, tables[0], out)
            say(f"picture: {out.absolute()}")
