"""``fedbn-flwr evaluate`` and ``calibrate``: the model of a run, later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.cli.console import (
    AFTERWARDS,
    StateFolder,
    Trust,
    app,
    exit_codes,
    say,
    say_table,
)
from fedbn_flwr.lab.config import read_overrides
from fedbn_flwr.lab.own_code import only_code_of
from fedbn_flwr.lab.results.files import reading, refuse_no_run

if TYPE_CHECKING:
    from fedbn_flwr.lab.results.evaluate import Row


@app.add(
    AFTERWARDS,
    "evaluate runs/fedbn --dataset usps --set data-dir=/data --out runs/usps",
)
def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    dataset: Annotated[
        str | None,
        typer.Option(
            help=(
                "Data set (`fedbn-flwr list datasets`). Default: the test examples"
                " of the run, site by site."
            )
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a run on the same split, to compare site by site."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="data-dir=PATH or device=NAME; repeatable."),
    ] = None,
    client: Annotated[
        int | None,
        typer.Option(help="Client whose own model to use. Default: the global model."),
    ] = None,
    state_dir: StateFolder = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="New folder for predictions.csv and metrics.json; with --dataset."
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Evaluate the model of a run on new data or at its own sites.

    The results at the sites have intervals.
    """
    # Check the arguments before the import of torch, so that an error is reported a
    # second earlier.
    with exit_codes():
        overrides = read_overrides(set_ or [])
        refuse_no_run(run)
        if against is not None:
            refuse_no_run(against)
    from fedbn_flwr.lab.cli.site_table import print_results
    from fedbn_flwr.lab.results.evaluate import evaluate_run

    with exit_codes(), only_code_of(dataset, unless=trust), reading(run):
        if dataset is None:
            # Without --dataset, evaluate at each site of the run. The options below
            # apply only to other data, so refuse them here.
            of_data = {
                "--set": set_,
                "--client": client is not None,
                "--state-dir": state_dir,
                "--out": out,
            }
            given = ", ".join(name for name, value in of_data.items() if value)
            if given:
                raise ConfigError(f"{given} needs --dataset, the data to evaluate on.")
            print_results(run, against)
        elif against:
            raise ConfigError(
                "--against compares two runs on their own test examples. Remove"
                " --dataset."
            )
        else:
            # Evaluate on all examples of the other data together.
            what, rows = evaluate_run(
                run,
                dataset,
                out,
                settings=overrides,
                client=client,
                state_dir=state_dir,
            )
            say(f"model: {what}")
            if rows:
                _show(rows)
        if out:
            say(f"results: {out.absolute()}")


def _show(rows: Sequence[Row]) -> None:
    """Print the results of an evaluation."""
    from fedbn_flwr.lab.results.numbers import label_of, shown

    metrics = [*rows[0].result.named()]
    cells = []
    for row in rows:
        values = [shown(value, name) for name, value in row.result.named().items()]
        cells.append([row.data, str(row.result.num_examples), *values])
    say_table(["data", "examples", *map(label_of, metrics)], cells)
    say("Each value is computed over all these examples together.")


@app.add(
    AFTERWARDS,
    "calibrate runs/fedbn --dataset folder:/data/new --out runs/new --predictions",
)
def calibrate(
    run: Annotated[
        Path,
        typer.Argument(help="Folder of the run; its config.yaml and model suffice."),
    ],
    dataset: Annotated[
        str, typer.Option(help="Data of the new site; labels optional.")
    ],
    out: Annotated[
        Path, typer.Option(help="New folder for the model, its page and its files.")
    ],
    way: Annotated[
        Literal["auto", "none", "all", "mix", "early", "matched"],
        typer.Option(help="BatchNorm statistics to use. auto chooses without labels."),
    ] = "auto",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="data-dir=PATH or device=NAME; repeatable."),
    ] = None,
    client: Annotated[
        int | None,
        typer.Option(
            help=(
                "Client whose own model to start from. Default: the global model, with"
                " averaged BN."
            )
        ),
    ] = None,
    predictions: Annotated[
        bool, typer.Option("--predictions", help="Write predictions.csv.")
    ] = False,
    width: Annotated[
        float,
        typer.Option(
            help="Width of the accuracy's 95 % interval that labels must give, in points."
        ),
    ] = 20.0,
    trust: Trust = False,
) -> None:
    """Fit the BatchNorm statistics of a run's model to a new site, without labels.

    Labels that are there are used only for the verdict.
    """
    with exit_codes():
        settings = read_overrides(set_ or [])
        refuse_no_run(run)
    from fedbn_flwr.lab.new_site import LABEL_FILE, calibrate_run
    from fedbn_flwr.lab.results.label_verdict import table_of

    with exit_codes(), only_code_of(dataset, unless=trust), reading(run):
        done = calibrate_run(
            run,
            dataset,
            out,
            way,
            settings=settings,
            client=client,
            with_predictions=predictions,
            width=width,
        )
        found = done.calibration
        say(f"model: {done.what}")
        used = "with labels" if done.tests else "used without labels"
        say(f"examples: {found.num_examples}, {used}")
        say(f"way: {found.reason}")
        for text in done.unlike:
            say(f"column {text}")
        say(f"{'from labels' if done.tests else 'verdict'}: {done.answer}")
        for name, text in done.tested.items():
            say(f"from labels, {name} the calibration: {done.metric} {text}")
        if done.labels:
            say_table(*table_of(done.labels))
        if not done.tests:
            say(f"to label: {(out / LABEL_FILE).absolute()}")
        say(f"page: {(out / 'calibration.html').absolute()}")
