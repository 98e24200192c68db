"""``fedbn-flwr inspect``: what a strategy does with the BN layers of a model."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from fedbn_flwr.errors import unknown_name
from fedbn_flwr.lab.cli.console import app, console, exit_codes


@app.command(epilog="Example: fedbn-flwr inspect --model resnet20 --strategy silobn --num-clients 5")
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
    from fedbn_flwr.lab.config import Config, read_overrides
    from fedbn_flwr.lab.runs.inspection import inspect_model
    from fedbn_flwr.lab.setup import initialise, make_model
    from fedbn_flwr.strategies import STRATEGIES
    from fedbn_flwr.training.settings import share_of

    with exit_codes():
        given = read_overrides(set_ or [])
        strategy = str(given.get("strategy", strategy))
        if strategy not in STRATEGIES:
            raise unknown_name("strategy", strategy, STRATEGIES)
        settings = Config.make({"model": model, "norm": norm, "dataset": dataset, **given, "strategy": strategy})
        if given.get("num-clients"):
            num_clients = max(1, share_of(settings.fraction_train, settings.num_clients))
        built = make_model(settings)
        loaded = initialise(built, settings)
        found = inspect_model(built, strategy, num_clients, settings)
        _print_inspection(f"{settings.model} (norm={settings.norm})", settings.title, num_clients, found, layers)
        for line in loaded.lines() if loaded else ():
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print_inspection(model: str, strategy: str, num_clients: int, found: Any, layers: bool) -> None:
    console.print(f"{model}, {strategy}, {num_clients} clients: {len(found.parts.layers)} BN layers", highlight=False)
    if layers and found.parts.layers:
        table = Table("BN layer", "entries", *(["training"] if found.frozen else []), box=None)
        for layer in found.parts.layers:
            training = "trains"
            if layer.path in found.fixed:
                training = "frozen, in eval mode"
            elif layer.entries.get("weight") in found.frozen:
                training = "statistics only"
            cells = [layer.path or "(the model itself)", " ".join(layer.entries), training]
            table.add_row(*cells[: len(table.columns)])
        console.print(table)
    table = Table("part", "floats", "integers", "what happens", box=None)
    for part, floats in found.floats.items():
        use = "stays with the client" if part in found.local else "shared"
        use += ", frozen after T*" if part in found.phases[-1].frozen else ""
        if found.reestimation and part == "statistics":
            use += "; re-estimated before a test"
        counters = found.counters[part]
        table.add_row(part.value, f"{floats:,}", f"{counters:,}", use if floats or counters else "-")
    table.add_row("all", f"{sum(found.floats.values()):,}", f"{sum(found.counters.values()):,}", "")
    console.print(table)
    table = Table("rounds", "exchanges", "MB of floats", "bytes down", "bytes up", "counters down/up", box=None)
    for phase in (*found.phases, *filter(None, [found.reestimation])):
        cost, name = phase.traffic, f"{phase.name} ({'?' if phase.rounds is None else phase.rounds})"
        counters = f"{cost.counters_down:,}/{cost.counters_up:,}"
        table.add_row(name, str(cost.exchanges), f"{cost.megabytes:.4f}", f"{cost.down:,}", f"{cost.up:,}", counters)
    console.print(table)
    if all(phase.rounds is not None for phase in found.phases):
        total, rounds = found.total(), sum(phase.rounds for phase in found.phases)
        plain = rounds * found.plain.megabytes
        line = f"{rounds:,} rounds: {total.exchanges:,} exchanges, {total.megabytes / 1024:.4f} GB of floats"
        if found.synchronised:
            more = [1 - rounds / total.exchanges, 1 - plain / total.megabytes]
            line += f"; beyond FedAvg {100 * more[0]:.2f} % of the exchanges, {100 * more[1]:.4f} % of the floats"
        console.print(line, highlight=False, soft_wrap=True)
    if found.frozen:
        line = f"train-only: {len(found.frozen)} parameters are frozen. They are equal on all clients, and sent anyway."
        console.print(line, highlight=False, soft_wrap=True)
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
