"""``fedbn-flwr report`` and ``doctor``.

What happened in a run or a study, and what is wrong with its BatchNorm.
"""

from __future__ import annotations

import json
import os.path
from pathlib import Path
from typing import Annotated

import typer

from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.lab.cli.console import AFTERWARDS, app, exit_codes, say
from fedbn_flwr.lab.config import read_overrides
from fedbn_flwr.lab.files import refuse_no_results

_NOT_KNOWN = 3
"""The exit code of ``doctor --strict`` where nothing was found and a part was not
measured.
"""


@app.add(AFTERWARDS, "report runs/digits --out runs/digits.html")
def report(
    folder: Annotated[
        Path,
        typer.Argument(metavar="RUN_OR_STUDY", help="The --out of a run or a sweep."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="File to write. Default: report.html in the folder."),
    ] = None,
) -> None:
    """Write one HTML page of a run or a study, which needs no other file and no
    network.
    """
    with exit_codes():
        refuse_no_results(folder)
    from fedbn_flwr.lab.doctor import examine
    from fedbn_flwr.lab.output.folder import extra
    from fedbn_flwr.lab.report import REPORT_FILE, write_report

    target = out or folder / REPORT_FILE
    with exit_codes():
        with extra("The doctor", f"To see it again: fedbn-flwr doctor {folder}"):
            examine(folder)
        write_report(folder, out)
        say(f"report: {target.absolute()}")


@app.add(AFTERWARDS, "doctor runs/fedbn --json")
def doctor(
    target: Annotated[
        str,
        typer.Argument(
            help="Folder of a run, file of a saved state, or name of a model."
        ),
    ],
    state: Annotated[
        Path | None,
        typer.Option(help="Saved state of the model: .safetensors, .pt, .pth, .npz."),
    ] = None,
    dataset: Annotated[
        str, typer.Option(help="Data for a model; `fedbn-flwr list datasets`.")
    ] = "",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value: the split, local-steps, ..."),
    ] = None,
    local_keys: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Names that your own FedBN keeps local: a line each, JSON, or a saved"
                " state."
            )
        ),
    ] = None,
    max_examples: Annotated[
        int, typer.Option(min=2, help="Examples of each client to use.")
    ] = 1024,
    json_: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of text.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(help="End with code 1 for a finding; 3 if a part is not known."),
    ] = False,
) -> None:
    """Say what is wrong with BatchNorm in a run, a model on data, or a saved state:
    evidence, and what to try.
    """
    from fedbn_flwr.lab.config import Config

    # what is asked for, and whether the options fit it, before torch is imported
    path = Path(os.path.expanduser(target))
    with exit_codes():
        settings = read_overrides(set_ or [])
        if path.is_dir():
            if dataset or set_ or state or local_keys:
                raise ConfigError(
                    "a run has its data, settings, state and split: leave out all but"
                    " its folder."
                )
        elif path.is_file():
            if dataset or state or set_:
                raise ConfigError(
                    f"{target} is a saved state: for data and settings name the model,"
                    " and give it with --state."
                )
        elif not dataset and not state:
            raise ConfigError(
                f"{target} is no folder of a run and no file. For a model give its data"
                " (--dataset NAME), a saved state (--state FILE), or both."
            )
        else:
            Config.check_keys(
                {
                    **settings,
                    "model": target,
                    **({"dataset": dataset} if dataset else {}),
                }
            )
    from fedbn_flwr.lab.doctor import (
        diagnose_model,
        diagnose_run,
        diagnose_saved_state,
        read_names,
    )

    # 1 and 3 are answers, under --strict
    with exit_codes(StateError):
        split = {}
        if local_keys:
            split["local_keys"] = read_names(local_keys)
        if path.is_dir():
            diagnosis = diagnose_run(path, max_examples)
        elif path.is_file():
            diagnosis = diagnose_saved_state(path, split=split)
        elif state and not dataset:
            diagnosis = diagnose_saved_state(state, target, settings, split)
        else:
            diagnosis = diagnose_model(
                target, dataset, settings, state, max_examples, split
            )
        if json_:
            print(json.dumps(diagnosis.to_json(), indent=2))
        else:
            say(str(diagnosis))
    if strict and (diagnosis.findings or diagnosis.not_measured):
        raise typer.Exit(1 if diagnosis.findings else _NOT_KNOWN)
