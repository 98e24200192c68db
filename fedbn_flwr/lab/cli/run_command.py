"""``fedbn-flwr run``: one run."""

from __future__ import annotations

import json
import shlex
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fedbn_flwr.errors import ConfigError, DivergedError
from fedbn_flwr.lab.cli.console import (
    TRAIN,
    ConfigFile,
    EngineChoice,
    Overrides,
    app,
    exit_codes,
    interrupt,
    progress,
    quiet_flower,
    report_own_data,
    say,
)


@app.add(TRAIN, "run --set strategy=fedbn --set num-server-rounds=30 --out runs/fedbn")
def run(
    config: ConfigFile = None,
    set_: Overrides = None,
    engine: Annotated[
        EngineChoice, typer.Option(help="Engine that runs the clients.")
    ] = "in-process",
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help=(
                "Worker processes of the engine in-process; 0 uses none. Default:"
                " one per core, if they save time."
            ),
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help=(
                "HOST:PORT of a Ray cluster for the engine simulation. The clients"
                " run on all its machines."
            )
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Output folder, new or empty. Default: runs/DATE-STRATEGY."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out.")
    ] = False,
) -> None:
    """Start or resume one run.

    The folder of the run contains its config, metrics, summary, model, curves and
    checkpoints.
    """
    from fedbn_flwr.lab.config.config import Config

    # Report a typing mistake before the import of torch, which takes a second.
    with exit_codes():
        overrides = list(set_ or [])
        if resume:
            config = _resumed(config, out)
            overrides.append("resume=true")
        settings = Config.load(config, overrides)
    from fedbn_flwr.lab.config.data import data_of
    from fedbn_flwr.lab.output.checkpoint import after_interrupt
    from fedbn_flwr.lab.references import ALONE, alone_command
    from fedbn_flwr.lab.runs.run import preflight, start

    with exit_codes():
        # The import above also imports Flower, and Flower then sets its log level.
        quiet_flower()
        default = f"runs/{datetime.now():%Y%m%d-%H%M%S}-{settings.title}"
        folder = out or Path(settings.out or default)
        if workers is not None and engine != "in-process":
            raise ConfigError(
                f"--workers={workers} is only for --engine in-process. Ray manages its"
                " own workers."
            )
        if ray_address is not None and engine != "simulation":
            raise ConfigError(
                f"--ray-address={ray_address} needs --engine simulation: only that engine"
                " uses Ray."
            )

        # The checks read the data.
        checked = preflight(settings, folder)
        report_own_data(checked.config)

        # the options of the command that resumes the run after Ctrl-C
        options = ""
        if engine != "in-process":
            options += f" --engine {engine}"
        if workers is not None:
            options += f" --workers {workers}"
        if ray_address is not None:
            options += f" --ray-address {ray_address}"

        rounds, score = settings.num_server_rounds, data_of(settings).task.score
        try:
            with (
                interrupt(lambda: after_interrupt(folder, options)),
                progress(rounds, settings.title, score) as advance,
            ):
                summary = start(checked, engine, advance, workers, ray_address)
        except DivergedError:
            # The folder is complete, up to the round that diverged.
            summary = json.loads((folder / "summary.json").read_text())
            _print_results(settings.title, summary, folder)
            raise
        _print_results(settings.title, summary, folder)
        if settings.strategy != ALONE and "sites" in summary:
            command = alone_command(settings, folder.parent / ALONE)
            say(f"Is it better than each site alone? {command}")


def _resumed(config: Path | None, out: Path | None) -> Path | None:
    """Return the given config file, or the config of the run in ``out``."""
    if out is None:
        raise ConfigError("--resume needs --out, the folder of the run to continue.")
    if config is None and not (out / "config.yaml").is_file():
        raise ConfigError(
            f"--resume: {out / 'config.yaml'} is absent. Set --out to the run's folder,"
            " or give CONFIG."
        )
    return config or out / "config.yaml"


def _print_results(strategy: str, summary: dict[str, Any], folder: Path) -> None:
    from fedbn_flwr.lab.cli.site_table import print_sites
    from fedbn_flwr.lab.output.folder import FLOWER_LOG
    from fedbn_flwr.training.tasks import quantity_of

    say(_summary_table(strategy, summary))
    if "sites" in summary:
        print_sites(summary["sites"], quantity_of(summary["headline"]))
    if "model-note" in summary:
        say(summary["model-note"])
    say(f"results: {folder.absolute()}")
    shown = shlex.quote(str(folder))
    say(f"next: fedbn-flwr report {shown}\n      fedbn-flwr doctor {shown}")
    say(f"      fedbn-flwr evaluate {shown} --dataset DATA")
    log = folder.absolute() / FLOWER_LOG
    if log.is_file():
        say(f"log of Flower's simulation: {log}")


def _summary_table(name: str, summary: dict[str, Any]) -> Table:
    headline, ledger = summary["headline"], summary["ledger"]
    # The value is None if there was no test, or if it is undefined.
    values = [summary[which].get(headline) for which in ("final", "best")]
    shown = ["-" if value is None else f"{value:.4f}" for value in values]
    rounds = str(summary["rounds"])
    if "diverged-at" in summary:
        rounds += ", diverged"
    megabytes = (ledger.get("bytes-down", 0) + ledger.get("bytes-up", 0)) / 2**20
    table = Table(
        "run", "metric", "final", "best", "rounds", "MB of floats", "seconds", box=None
    )
    table.add_row(
        name, headline, *shown, rounds, f"{megabytes:.2f}", f"{summary['seconds']:.1f}"
    )
    return table
