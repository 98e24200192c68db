"""``fedbn-flwr list``, ``inspect`` and ``partition``.

These commands show the choices for a run, its messages, and the split of its data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from fedbn_flwr.errors import unknown_name
from fedbn_flwr.lab.cli.console import (
    BEFORE,
    ConfigFile,
    Overrides,
    app,
    exit_codes,
    report_own_data,
    say,
)

if TYPE_CHECKING:
    from fedbn_flwr.batchnorm.parts import Part
    from fedbn_flwr.lab.runs.inspection import Inspection


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


@app.add(BEFORE, "inspect --model resnet20 --strategy silobn --num-clients 5")
def inspect(
    model: Annotated[
        str, typer.Option(help="Name of the model (`fedbn-flwr list models`).")
    ] = "resnet20",
    strategy: Annotated[
        str, typer.Option(help="Strategy (`fedbn-flwr list strategies`).")
    ] = "fedavg",
    norm: Annotated[
        str, typer.Option(help="Normalisation (`fedbn-flwr list norms`).")
    ] = "batch",
    num_clients: Annotated[int, typer.Option(min=1, help="Clients per round.")] = 5,
    dataset: Annotated[
        str, typer.Option(help="Data set that sets the model's input and classes.")
    ] = "cifar10",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Setting of the run, KEY=VALUE; repeatable."),
    ] = None,
) -> None:
    """Show the BN layers of a model, and which entries a strategy shares or keeps."""
    from fedbn_flwr.lab.config import Config, read_overrides
    from fedbn_flwr.strategies import METHODS

    with exit_codes():
        given = read_overrides(set_ or [])
        strategy = str(given.get("strategy", strategy))
        # strategy=centralized is not in METHODS, because it sends no messages that could
        # be inspected.
        if strategy not in METHODS:
            raise unknown_name("strategy", strategy, METHODS)
        options = {"model": model, "norm": norm, "dataset": dataset}
        settings = Config.make({**options, **given, "strategy": strategy})
    from fedbn_flwr.lab.runs.inspection import inspect_model
    from fedbn_flwr.lab.setup import initialise, make_model
    from fedbn_flwr.training.settings import share_of

    with exit_codes():
        # The option --num-clients is the number of clients in a round, but --set
        # num-clients=N is the number of all clients.
        if given.get("num-clients"):
            share = share_of(settings.fraction_train, settings.num_clients)
            num_clients = max(1, share)
        built = make_model(settings)
        loaded = initialise(built, settings)
        inspection = inspect_model(built, strategy, num_clients, settings)
        say(
            f"{settings.model} (norm={settings.norm}), {settings.title}, {num_clients}"
            f" clients: {len(inspection.parts.layers)} BN layers"
        )
        say(_layers(inspection))
        for line in _costs(inspection):
            say(line)
        for warning in inspection.warnings:
            say(f"warning: {warning}", style="yellow")
        for line in loaded.lines() if loaded else ():
            say(line)


def _layers(inspection: Inspection) -> Table:
    """Return a table with a row for each BN layer and for the rest of the model.

    A row has the treatment and the number of the floats.
    """
    from fedbn_flwr.batchnorm.parts import Part

    floats, counters = inspection.floats, inspection.counters
    use = {part: _use(inspection, part) for part in floats}
    part_of = inspection.parts.part_of
    table = Table(
        "BN layer", "gamma and beta", "running statistics", "floats", box=None
    )

    # Add a row for each BN layer.
    for layer in inspection.parts.layers:
        affine = statistics = "-"
        if "weight" in layer.entries:
            affine = use[part_of[layer.entries["weight"]]]
            if layer.entries["weight"] in inspection.frozen:
                affine += "; not trained"
        if "running_mean" in layer.entries:
            statistics = use[part_of[layer.entries["running_mean"]]]
            if layer.path in inspection.fixed:
                statistics += "; in eval mode"
        size = 0
        for name in layer.entries.values():
            if part_of[name] != Part.COUNTERS:
                size += inspection.sizes[name]
        table.add_row(
            layer.path or "(the model itself)", affine, statistics, f"{size:,}"
        )

    # Add rows for the other layers, and for the sums.
    table.add_row(
        "all other layers", f"({use[Part.REST]})", "", f"{floats[Part.REST]:,}"
    )
    if inspection.parts.personal:
        shown = f"{floats[Part.PERSONAL]:,}"
        table.add_row("personal entries", f"({use[Part.PERSONAL]})", "", shown)
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
    """Return in words how the method treats a part, such as "shared"."""
    words = ["stays with the client" if part in inspection.local else "shared"]
    if inspection.synchronised and part == "statistics":
        words.append("synchronised in each step")
    if part in inspection.phases[-1].frozen:
        words.append("frozen after T*")
    if inspection.reestimation and part == "statistics":
        words.append("re-estimated before a test")
    return ", ".join(words)


def _costs(inspection: Inspection) -> Iterator[str]:
    """Yield a text on the traffic of a round in each phase, and of all rounds."""
    for phase in (*inspection.phases, inspection.reestimation):
        if phase is None:
            continue
        cost = phase.traffic
        # None means that the run itself determines the length of the phase.
        rounds = "?" if phase.rounds is None else phase.rounds
        yield (
            f"{phase.name} ({rounds} rounds), each: {cost.exchanges} exchanges,"
            f" {cost.megabytes:.4f} MB of floats: {cost.down:,} bytes down, {cost.up:,}"
            f" up; counters {cost.counters_down:,} down, {cost.counters_up:,} up"
        )
    # The total is unknown if the run itself determines the length of a phase.
    if all(phase.rounds is not None for phase in inspection.phases):
        total = inspection.total()
        yield (
            f"all rounds: {total.exchanges:,} exchanges, {total.megabytes / 1024:.4f}"
            " GB of floats"
        )
    if inspection.frozen:
        number = len(inspection.frozen)
        yield (
            f"frozen parameters: {number}. They are equal on all clients but are sent"
            " anyway."
        )


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
