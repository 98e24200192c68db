"""``fedbn-flwr list``, ``inspect`` and ``partition``: what a run can use, what it sends, and how it splits its data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from fedbn_flwr.errors import unknown_name
from fedbn_flwr.lab.cli.console import BEFORE, app, exit_codes, report_own_data, say

if TYPE_CHECKING:
    from fedbn_flwr.lab.runs.inspection import Inspection


Kind = Literal["strategies", "norms", "models", "datasets", "partitions"]
"""The registries that ``list`` shows."""


@app.add(BEFORE, "list strategies", name="list")
def list_(kind: Annotated[Kind, typer.Argument(help="What to list.")]) -> None:
    """List the names that a config can use, one line each, with the source."""
    from fedbn_flwr.lab.config.table import rows

    names, texts, _ = zip(*rows(kind), strict=True)
    for name, what, source in rows(kind):
        say(f"{name.ljust(len(max(names, key=len)))}  {what.ljust(len(max(texts, key=len)))}  {source}")


@app.add(BEFORE, "inspect --model resnet20 --strategy silobn --num-clients 5")
def inspect(
    model: Annotated[str, typer.Option(help="Model; `fedbn-flwr list models`.")] = "resnet20",
    strategy: Annotated[str, typer.Option(help="Strategy; `fedbn-flwr list strategies`.")] = "fedavg",
    norm: Annotated[str, typer.Option(help="Normalisation; `fedbn-flwr list norms`.")] = "batch",
    num_clients: Annotated[int, typer.Option(min=1, help="Clients per round.")] = 5,
    dataset: Annotated[str, typer.Option(help="Data set; gives the model's input and classes.")] = "cifar10",
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value of the method, rounds, ...")] = None,
    layers: Annotated[bool, typer.Option(help="List the BN layers by path.")] = True,
) -> None:
    """Show a model's BN layers, and what a strategy shares, keeps and sends per round."""
    from fedbn_flwr.lab.config import read_overrides
    from fedbn_flwr.lab.config.at_once import refuse_at_once
    from fedbn_flwr.lab.config.table import table

    with exit_codes():
        given = read_overrides(set_ or [])
        strategy = str(given.get("strategy", strategy))
        if strategy not in table()["methods"]:
            raise unknown_name("strategy", strategy, table()["methods"])
        refuse_at_once(None, set_ or [], model=model, norm=norm, dataset=dataset, strategy=strategy)
    from fedbn_flwr.lab.config import Config
    from fedbn_flwr.lab.data import is_own
    from fedbn_flwr.lab.runs.inspection import inspect_model
    from fedbn_flwr.lab.setup import initialise, make_model
    from fedbn_flwr.training.settings import share_of

    with exit_codes():
        settings = Config.make({"model": model, "norm": norm, "dataset": dataset, **given, "strategy": strategy})
        if given.get("num-clients"):
            num_clients = max(1, share_of(settings.fraction_train, settings.num_clients))
        built = make_model(settings)
        loaded = initialise(built, settings)
        inspection = inspect_model(built, strategy, num_clients, settings)
        layers_of_model = inspection.parts.layers
        named = f"{settings.model} (norm={settings.norm}), {settings.title}, {num_clients} clients"
        say(f"{named}: {len(layers_of_model)} BN layers")
        if layers and layers_of_model:
            say(_layers(inspection))
        say(_parts(inspection))
        say(_traffic(inspection))
        for line in _notes(inspection):
            say(line)
        of_data = settings.data_info().warnings if is_own(settings.dataset) else ()
        for warning in (*inspection.warnings, *of_data):
            say(f"warning: {warning}", style="yellow")
        for line in loaded.lines() if loaded else ():
            say(line)


def _layers(inspection: Inspection) -> Table:
    """Return the BN layers; where some parameters or statistics are frozen, what of each trains."""
    table = Table("BN layer", "entries", box=None)
    if inspection.frozen or inspection.fixed:
        table.add_column("training")
    for layer in inspection.parts.layers:
        learns = layer.entries.get("weight") not in {None, *inspection.frozen}
        training = "trains"
        if layer.path in inspection.fixed:
            training = "gamma and beta only, in eval mode" if learns else "frozen, in eval mode"
        elif layer.entries.get("weight") in inspection.frozen:
            training = "statistics only"
        cells = [layer.path or "(the model itself)", " ".join(layer.entries), training]
        table.add_row(*cells[: len(table.columns)])
    return table


def _parts(inspection: Inspection) -> Table:
    table = Table("part", "floats", "integers", "what happens", box=None)
    for part, floats in inspection.floats.items():
        use = "stays with the client" if part in inspection.local else "shared"
        if part in inspection.phases[-1].frozen:
            use += ", frozen after T*"
        if inspection.reestimation and part == "statistics":
            use += "; re-estimated before a test"
        counters = inspection.counters[part]
        table.add_row(part.value, f"{floats:,}", f"{counters:,}", use if floats or counters else "-")
    table.add_row("all", f"{sum(inspection.floats.values()):,}", f"{sum(inspection.counters.values()):,}", "")
    return table


def _traffic(inspection: Inspection) -> Table:
    table = Table("rounds", "exchanges", "MB of floats", "bytes down", "bytes up", "counters down/up", box=None)
    for phase in filter(None, (*inspection.phases, inspection.reestimation)):
        cost, rounds = phase.traffic, "?" if phase.rounds is None else phase.rounds
        counters = f"{cost.counters_down:,}/{cost.counters_up:,}"
        numbers = (str(cost.exchanges), f"{cost.megabytes:.4f}", f"{cost.down:,}", f"{cost.up:,}", counters)
        table.add_row(f"{phase.name} ({rounds})", *numbers)
    return table


def _notes(inspection: Inspection) -> Iterator[str]:
    known = [phase.rounds for phase in inspection.phases if phase.rounds is not None]
    if len(known) == len(inspection.phases):
        total, rounds = inspection.total(), sum(known)
        line = f"{rounds:,} rounds: {total.exchanges:,} exchanges, {total.megabytes / 1024:.4f} GB of floats"
        if inspection.synchronised:
            exchanges, floats = 1 - rounds / total.exchanges, 1 - rounds * inspection.plain.megabytes / total.megabytes
            line += f"; beyond FedAvg {100 * exchanges:.2f} % of the exchanges, {100 * floats:.4f} % of the floats"
        yield line
    if inspection.frozen:
        number = len(inspection.frozen)
        yield f"{number} parameters are frozen. They are equal on all clients, and sent anyway."


@app.add(BEFORE, "partition --set partition=dirichlet --set num-clients=10 --out split.png")
def partition(
    config: Annotated[Path | None, typer.Argument(help="YAML file of settings; without it, the defaults.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value, replaces the file's; repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="Picture (PNG) of classes by clients to write; a new file.")] = None,
) -> None:
    """Show the split of the training and validation data: each client's examples by class, and by domain if any."""
    from fedbn_flwr.lab.config.at_once import refuse_at_once

    with exit_codes():
        refuse_at_once(config, set_ or [])
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
            say(f"{table.of} examples by {table.what}")
            text = partition_table(table.counts, table.names)
            say(text + "\n")
        split = partitioned_data(settings, count_clients(settings))
        for line in (*classes_without_client(split, settings), *warnings):
            say(f"warning: {line}", style="yellow")
        if out:
            draw_split(settings, tables[0], out)
            say(f"picture: {out.absolute()}")
