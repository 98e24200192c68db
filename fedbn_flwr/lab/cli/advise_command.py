"""``fedbn-flwr advise`` finds the method that suits the sites."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.cli.console import (
    TRAIN,
    ConfigFile,
    Overrides,
    app,
    bars,
    exit_codes,
    interrupt,
    quiet_flower,
    say,
)


@app.add(TRAIN, "advise apps/heart.yaml --out runs/advice --hours 1")
def advise(
    out: Annotated[
        Path, typer.Option(help="Folder of all runs; finished runs in it are kept.")
    ],
    config: ConfigFile = None,
    set_: Overrides = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Most rounds of all runs together."),
    ] = None,
    hours: Annotated[
        float | None,
        typer.Option(help="Most hours, estimated from the first rounds."),
    ] = None,
    metric: Annotated[
        str, typer.Option(help="Metric that compares the methods, such as auroc.")
    ] = "",
    methods: Annotated[
        str,
        typer.Option(
            help="Comma list of methods to try in addition to the references, such as"
            " 'fedbn,fixbn'. Default: the methods that the data suggest."
        ),
    ] = "",
    rates: Annotated[
        str,
        typer.Option(
            help="Comma list of at least three learning rates. Default: 0.3, 1 and 3"
            " times the config's."
        ),
    ] = "",
    parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of parallel runs. Default: one per core, if they save time.",
        ),
    ] = None,
) -> None:
    """Find the method that suits your sites, and whether the federation is worth it.

    Short runs compare training alone, FedAvg with BatchNorm, FedAvg with GroupNorm and
    the methods that the data suggest. The best methods are run to the end with
    three seeds.
    """
    from fedbn_flwr.lab.config.config import Config
    from fedbn_flwr.lab.config.values import listed, merged, number, read_settings

    # Check the settings before the import of torch, so that a typing mistake is
    # reported a second earlier.
    with exit_codes():
        settings = merged(read_settings(config, set_ or []))
        Config.check_keys(settings)
        numbers = [number(text) for text in listed(rates)]
        if None in numbers:
            raise ConfigError(f"--rates={rates} is not a list of numbers.")
        if hours is not None and not hours > 0:
            raise ConfigError(f"--hours={hours} must be above 0.")
    from fedbn_flwr.lab.advice import advisor
    from fedbn_flwr.lab.cli.sweep_command import Display

    with exit_codes():
        quiet_flower()
        saved = f"Finished runs in {out} are kept. The same command continues."
        with interrupt(lambda: saved), bars() as progress:
            advice = advisor.advise_config(
                settings,
                out,
                rounds=rounds,
                hours=hours,
                metric=metric,
                methods=listed(methods),
                rates=[float(value) for value in numbers if value is not None],
                parallel=parallel,
                follower=Display(progress, "advice"),
                say=say,
            )
    say()
    for sentence in (*advice["answer"], *advice["conditions"]):
        say(sentence)
    folder = shlex.quote(str(out))
    say(f"\nthe recommended config: {out.absolute() / advisor.RECOMMENDED_FILE}")
    say(f"next: fedbn-flwr report {folder}")
