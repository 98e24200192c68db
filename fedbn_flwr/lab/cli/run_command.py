"""``fedbn-flwr run``: one run."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from fedbn_flwr.errors import ConfigError, DivergedError
from fedbn_flwr.lab.cli.console import (
    TRAIN,
    ConfigFile,
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
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help=(
                "Worker processes; 0 uses none. Default:"
                " one per core, if they save time."
            ),
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

    The folder of the run contains its config, metrics, summary, model, tables of
    tests and checkpoints.
    """
    from fedbn_flwr.lab.config.config import Config

    # Check the settings first, so that a typing mistake is reported early.
    with exit_codes():
        overrides = list(set_ or [])
        if resume:
            config = _resumed(config, out)
            overrides.append("resume=true")
        settings = Config.load(config, overrides)
    from fedbn_flwr.lab.config.data import data_of
    from fedbn_flwr.lab.results.checkpoint import after_interrupt
    from fedbn_flwr.lab.runs.run import preflight, start

    with exit_codes():
        # Quiet Flower after the import above, because that import loads Flower, and
        # Flower sets its log level when it is loaded.
        quiet_flower()
        default = f"runs/{datetime.now():%Y%m%d-%H%M%S}-{settings.strategy}"
        folder = out or Path(settings.out or default)
        checked = preflight(settings, folder)
        report_own_data(checked.config)

        # After Ctrl-C, the user resumes the run by a command with these options.
        options = ""
        if workers is not None:
            options += f" --workers {workers}"

        rounds, score = settings.num_server_rounds, data_of(settings).task.score
        try:
            with (
                interrupt(lambda: after_interrupt(folder, options)),
                progress(rounds, settings.strategy, score) as advance,
            ):
                start(checked, advance, workers)
        except DivergedError:
            # The results are complete up to the round that diverged, so print them
            # before the error.
            _print_end(folder)
            raise
        _print_end(folder)


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


def _print_end(folder: Path) -> None:
    """Print the results of a run as ``fedbn-flwr evaluate`` does, and what is next."""
    from fedbn_flwr.lab.cli.site_table import print_results
    from fedbn_flwr.lab.results.files import command
    from fedbn_flwr.lab.results.folder import trusting
    from fedbn_flwr.lab.results.run_files import RunFiles

    run = RunFiles.read(folder)
    if not run.has_model:
        say(
            f"No usable model: diverged in round {run.diverged_at}: {run.divergence}",
            style="red",
        )
    elif "sites" in run.summary:
        # a run with large predictions does not keep them
        with suppress(ConfigError):
            print_results(folder)
    say(f"results: {folder.absolute()}")
    say(f"next: {command('report', folder, *trusting(folder))}")
