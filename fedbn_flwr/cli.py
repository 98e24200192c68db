"""The command line: ``fedbn-flwr run | sweep | list | inspect | partition | evaluate | export``."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedbn_flwr.errors import (
    ConfigError,
    DataError,
    DivergedError,
    FedBNError,
    NormLayerError,
    RunFailedError,
    unknown_name,
)

__all__ = ["app", "main"]

app = typer.Typer(
    help="Batch Normalization in federated learning, on Flower.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console()
complaints = Console(stderr=True)


class Engine(StrEnum):
    """Where the clients run."""

    in_process = "in-process"
    simulation = "simulation"


class Kind(StrEnum):
    """The registries that ``list`` shows."""

    strategies = "strategies"
    norms = "norms"
    models = "models"
    datasets = "datasets"
    partitions = "partitions"


class DataPart(StrEnum):
    """The examples that ``evaluate`` uses."""

    train = "train"
    test = "test"
    all = "all"


class ExportFormat(StrEnum):
    """The formats of ``export``."""

    torch = "torch"
    torch_export = "torch-export"
    onnx = "onnx"


class AveragedBN(StrEnum):
    """The BN of ``export``."""

    averaged = "averaged"


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Turn errors into exit codes: 2 for bad usage, config or data, 1 for a failed run, 130 for Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt as error:  # its argument says what is saved
        text = " ".join(["interrupted.", *map(str, error.args)]) if any(error.args) else "interrupted"
        complaints.print(text, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(130) from error
    except FedBNError as error:
        complaints.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, (ConfigError, DataError, NormLayerError)) else 1) from error


@contextmanager
def _interrupt(what_is_saved: Callable[[], str]) -> Iterator[None]:
    """Add to a Ctrl-C what is saved and how to go on."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(what_is_saved()) from error


@app.command(epilog="Example: fedbn-flwr run --set strategy=fedbn --set num-server-rounds=30 --out runs/fedbn")
def run(
    config: Annotated[Path | None, typer.Argument(help="YAML file of settings; without it, the defaults.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value, replaces the file's; repeatable.")] = None,
    engine: Annotated[Engine, typer.Option(help="Where the clients run.")] = Engine.in_process,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, help="Worker processes of the engine in-process; 0: none. Default: the cores, if the work pays."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder, new or empty. Default: runs/DATE-STRATEGY.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
) -> None:
    """Do a run, or the rest of it, and write its folder: config, metrics, summary, model, curves, checkpoints."""
    from fedbn_flwr.experiment.checkpoint import after_interrupt
    from fedbn_flwr.experiment.config import Config
    from fedbn_flwr.experiment.run import preflight
    from fedbn_flwr.experiment.run import run as launch

    with _exit_codes():
        _quiet_flower()
        if resume:
            config, set_ = _resumed(config, out), [*(set_ or []), "resume=true"]
        settings = Config.load(config, set_ or [])
        folder = out or Path(settings.out or f"runs/{datetime.now():%Y%m%d-%H%M%S}-{settings.title}")
        if workers is not None and engine is not Engine.in_process:
            raise ConfigError(f"--workers={workers} is for --engine in-process; Ray has workers of its own.")
        _report_own_data(preflight(settings, folder)[0])
        options = "" if engine is Engine.in_process else f" --engine {engine.value}"
        options += "" if workers is None else f" --workers {workers}"
        try:
            with (
                _interrupt(lambda: after_interrupt(folder, options)),
                _progress(settings.num_server_rounds, settings.title, settings.learning_task().score) as advance,
            ):
                summary = launch(settings, folder, engine.value, advance, workers)
        except DivergedError:
            _print_results(settings.title, json.loads((folder / "summary.json").read_text()), folder)
            raise
        _print_results(settings.title, summary, folder)


def _report_own_data(settings: Any) -> None:
    """Print what was read of own data; warnings are logged when the run starts."""
    from fedbn_flwr.data import is_own
    from fedbn_flwr.experiment.data_report import data_report
    from fedbn_flwr.experiment.partitioned_data import count_clients, partitioned_data

    if is_own(settings.dataset) and not settings.dataset.endswith(":"):
        split = partitioned_data(settings, count_clients(settings))
        console.print(data_report(split, settings).text(), markup=False, highlight=False, soft_wrap=True)


def _resumed(config: Path | None, out: Path | None) -> Path | None:
    """Return the given config file, else that of the run in ``out``."""
    if out is None:
        raise ConfigError("--resume needs --out, the folder of the run to continue.")
    if config is None and not (out / "config.yaml").is_file():
        raise ConfigError(f"--resume: {out / 'config.yaml'} is absent. Set --out to the run's folder, or give CONFIG.")
    return config or out / "config.yaml"


@app.command(name="list", epilog="Example: fedbn-flwr list strategies")
def list_(kind: Annotated[Kind, typer.Argument(help="What to list.")]) -> None:
    """List the names that a config can use, one line each, with the source."""
    rows: list[tuple[str, str, str]]
    if kind is Kind.strategies:
        from fedbn_flwr.strategies import STRATEGIES

        rows = [(name, strategy.summary_line, strategy.source) for name, strategy in STRATEGIES.items()]
        rows.append(("centralized", "the reference: one loop over all data (`fedbn-flwr run` only)", "-"))
    else:
        rows = [(name, info.summary, info.source) for name, info in _registry(kind).items()]
        if kind is Kind.datasets:
            from fedbn_flwr.data import KINDS

            forms = [form.partition(", ") for form in KINDS.values()]
            rows += [(name, what, "own data") for name, _, what in forms]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, what, source in rows:
        line = f"{name:<{widths[0]}}  {what:<{widths[1]}}  {source}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command(epilog="Example: fedbn-flwr sweep apps/main/recipes/demo.yaml --out runs/digits")
def sweep(
    study: Annotated[Path, typer.Argument(help="YAML file: base, methods, splits, seeds, paper.")],
    out: Annotated[Path, typer.Option(help="Folder of all runs; finished ones in it are skipped.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value, replaces the study's base.")] = None,
    engine: Annotated[Engine, typer.Option(help="Where the clients run.")] = Engine.in_process,
) -> None:
    """Do a grid of runs, methods x splits x seeds, and write a table with mean and standard deviation."""
    from fedbn_flwr.experiment.sweep import Study, finished
    from fedbn_flwr.experiment.sweep import sweep as launch

    with _exit_codes():
        _quiet_flower()
        grid = Study.load(study, set_ or [])
        folders = [cell.folder(out) for cell in grid.cells()]
        total = len(folders)

        def saved() -> str:
            return (
                f"Finished in {out}: {sum(map(finished, folders))} of {total} runs.\nThe same command goes on with the "
                "others, and with an unfinished run from its last checkpoint."
            )

        failed: RunFailedError | None = None
        try:
            with _interrupt(saved), _progress(total, grid.name) as follow:
                table = launch(
                    grid,
                    out,
                    engine.value,
                    lambda cell, index, _: follow.cell(cell.name, index, cell.config.learning_task().score),
                )
                follow.cell("done", total)
        except RunFailedError as error:
            table, failed = error.result, error
        console.print(table, markup=False, highlight=False, soft_wrap=True)
        console.print(f"results: {out.absolute()}", highlight=False, soft_wrap=True)
        if failed:
            raise failed


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
    from fedbn_flwr.experiment.config import Config, read_overrides
    from fedbn_flwr.experiment.inspection import inspect_model
    from fedbn_flwr.experiment.setup import initialise, make_model
    from fedbn_flwr.strategies import STRATEGIES

    with _exit_codes():
        if strategy not in STRATEGIES:
            raise unknown_name("strategy", strategy, STRATEGIES)
        chosen = {"model": model, "norm": norm, "dataset": dataset, "strategy": strategy}
        settings = Config.make({**chosen, **read_overrides(set_ or [])})
        built = make_model(settings)
        loaded = initialise(built, settings)
        found = inspect_model(built, strategy, num_clients, settings)
        _print_inspection(f"{settings.model} (norm={settings.norm})", settings.title, num_clients, found, layers)
        for line in loaded.lines() if loaded else ():
            console.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command(epilog="Example: fedbn-flwr partition --set partition=dirichlet --set num-clients=10 --out split.png")
def partition(
    config: Annotated[Path | None, typer.Argument(help="YAML file of settings; without it, the defaults.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value, replaces the file's; repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="Picture (PNG) of classes by clients to write; a new file.")] = None,
) -> None:
    """Show the split of the training and validation data: each client's examples by class, and by domain if any."""
    from fedbn_flwr.data import partition_table
    from fedbn_flwr.experiment.config import Config
    from fedbn_flwr.experiment.splitting import count_split, draw_split

    with _exit_codes():
        settings = Config.load(config, set_ or [])
        _report_own_data(settings)
        tables = count_split(settings)
        for table in tables:
            console.print(f"{table.of} examples by {table.what}", highlight=False)
            text = partition_table(table.counts, table.names)
            console.print(text + "\n", markup=False, highlight=False, soft_wrap=True)
        if out:
            draw_split(settings, tables[0], out)
            console.print(f"picture: {out.absolute()}", highlight=False, soft_wrap=True)


@app.command(epilog="Example: fedbn-flwr evaluate runs/fedbn --dataset usps --set data-dir=/data --bn adapt --out usps")
def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    dataset: Annotated[str, typer.Option(help="The data; `fedbn-flwr list datasets`.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value of the data; repeatable.")] = None,
    bn: Annotated[
        str, typer.Option(help="averaged, own:CLIENT, or adapt: statistics of the new inputs. Default: the global BN.")
    ] = "",
    part: Annotated[
        DataPart | None,
        typer.Option(help="Which examples. Default: all of new own data without a split of their own, else test."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New folder for predictions.csv and metrics.json.")] = None,
) -> None:
    """Evaluate the model of a run on any data: a table of its metrics, and its predictions."""
    from fedbn_flwr.experiment.config import read_overrides
    from fedbn_flwr.experiment.evaluate_run import evaluate_run

    with _exit_codes():
        data = {**read_overrides(set_ or []), "dataset": dataset}
        what, rows = evaluate_run(run, data, bn, part.value if part else "", out)
        console.print(f"model: {what}", markup=False, highlight=False, soft_wrap=True)
        metrics = list(rows[0].result.named())
        table = Table("data", "BN statistics", "examples", *metrics, box=None)
        for column in table.columns:
            column.overflow = "fold"
        for row in rows:
            values = [f"{value:.4f}" for value in row.result.named().values()]
            table.add_row(row.data, row.statistics, str(row.result.num_examples), *values)
        console.print(table)
        console.print("Each figure is pooled: over all these examples together.", highlight=False)
        if out:
            console.print(f"results: {out.absolute()}", markup=False, highlight=False, soft_wrap=True)


@app.command(epilog="Example: fedbn-flwr export runs/fedbn --client 2 --format onnx --fold-bn --out home/model.onnx")
def export(
    run: Annotated[Path, typer.Argument(help="Folder of the run; on a remote site its config.yaml and model suffice.")],
    format: Annotated[ExportFormat, typer.Option(help="The file's format.")],
    out: Annotated[Path, typer.Option(help="File to write, .safetensors, .pt2 or .onnx; MODEL_CARD.md is beside it.")],
    client: Annotated[int | None, typer.Option(help="This client's own model. Default: the global model.")] = None,
    bn: Annotated[AveragedBN | None, typer.Option(help="The average of the BN that the clients keep.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="State folder of this site: its own model.")] = None,
    fold_bn: Annotated[bool, typer.Option("--fold-bn", help="Fold BN into the layers before it.")] = False,
    normalise: Annotated[bool, typer.Option(help="The model takes pixels 0..255, as the data hold them.")] = True,
) -> None:
    """Write a model of a run as one file, checked against the evaluated model, with a model card."""
    from fedbn_flwr.experiment.export import export as write
    from fedbn_flwr.experiment.saved_model import Choice

    with _exit_codes():
        choice = Choice(client, bn is not None, state_dir)
        done = write(run, out, format.value, choice, fold_bn=fold_bn, normalise=normalise)
        for line in [f"model: {done.what}", *(done.folding.lines(shown=3) if done.folding else ())]:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print(f"check: {done.check}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"file: {done.file.absolute()}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"card: {done.card.absolute()}", markup=False, highlight=False, soft_wrap=True)


def _registry(kind: Kind) -> Any:
    from fedbn_flwr.data import DATASETS, PARTITIONS
    from fedbn_flwr.models import MODELS
    from fedbn_flwr.norms import NORMS

    return {Kind.norms: NORMS, Kind.models: MODELS, Kind.datasets: DATASETS, Kind.partitions: PARTITIONS}[kind]


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


def _print_results(strategy: str, summary: dict[str, Any], folder: Path) -> None:
    console.print(_summary_table({strategy: summary}))
    if note := summary.get("model-note"):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    console.print(f"results: {folder.absolute()}", highlight=False, soft_wrap=True)


def _summary_table(summaries: dict[str, dict[str, Any]]) -> Table:
    table = Table("run", "metric", "final", "best", "rounds", "MB of floats", "seconds", box=None)
    for name, summary in summaries.items():
        headline, ledger = summary["headline"], summary["ledger"]
        final, best = summary["final"].get(headline), summary["best"].get(headline)
        megabytes = (ledger.get("bytes-down", 0) + ledger.get("bytes-up", 0)) / 2**20
        shown = [f"{value:.4f}" if value is not None else "-" for value in (final, best)]
        rounds = str(summary["rounds"])
        if "diverged-at" in summary:
            rounds += ", diverged"
        table.add_row(name, headline, *shown, rounds, f"{megabytes:.2f}", f"{summary['seconds']:.1f}")
    return table


class _Bar:
    """A progress bar with loss, score and the remaining time; call it with each line of metrics."""

    def __init__(self, progress: Progress, total: int, name: str, score: str = "accuracy") -> None:
        self._progress, self._score = progress, score
        self._task = progress.add_task(name, total=total, shown="")

    def __call__(self, line: Any) -> None:
        """Advance to the round of the line."""
        self._progress.update(self._task, completed=line["round"])
        self._show(line)

    def cell(self, name: str, index: int, score: str = "accuracy") -> Callable[[Any], None]:
        """Advance to run ``index`` of a sweep; return the function to call with each of its lines of metrics."""
        self._progress.update(self._task, completed=index, description=name, shown="")
        self._score = score
        return lambda line: self._show(line, f"round {line['round']} ")

    def _show(self, line: Any, prefix: str = "") -> None:
        label = {"accuracy": "acc"}.get(self._score, self._score)
        wanted = {"loss": "train-loss", label: f"test-{self._score}", "own": f"personal-own-{self._score}"}
        parts = [f"{label} {line[key]:.4f}" for label, key in wanted.items() if line.get(key) is not None]
        if parts:
            self._progress.update(self._task, shown=prefix + " ".join(parts))


@contextmanager
def _progress(total: int, name: str, score: str = "accuracy") -> Iterator[_Bar]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[shown]}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=complaints) as progress:
        yield _Bar(progress, total, name, score)


def _quiet_flower() -> None:
    """Hide Flower's log of every round; warnings and errors still show."""
    logging.getLogger("flwr").setLevel(logging.WARNING)


def main() -> None:
    """Run the command line."""
    sys.exit(app())
