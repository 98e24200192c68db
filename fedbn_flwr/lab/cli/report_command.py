"""``fedbn-flwr report`` and ``doctor``.

These commands show the results of a run or a study, and faults of its BatchNorm.
"""

from __future__ import annotations

import json
import os.path
from pathlib import Path
from typing import Annotated

import typer

from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.lab.cli.console import AFTERWARDS, Trust, app, exit_codes, say
from fedbn_flwr.lab.own_code import only_code_of
from fedbn_flwr.lab.results.files import command, reading, refuse_no_results

_NOT_KNOWN = 3
"""The exit code of ``doctor --strict`` if there is no finding but a part was not
measured.
"""


@app.add(AFTERWARDS, "report runs/digits")
def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_STUDY", help="Output folder of a run or a sweep."
        ),
    ],
    trust: Trust = False,
) -> None:
    """Write report.html about a run or a study into its folder.

    The page needs no other file and no network. The page of an unfinished run shows
    its present state.
    """
    with exit_codes():
        refuse_no_results(folder)
    from fedbn_flwr.lab.diagnose_run import examine
    from fedbn_flwr.lab.report.page import write_report
    from fedbn_flwr.lab.results.folder import extra, trusting

    with exit_codes(), only_code_of(unless=trust), reading(folder):
        again = command("doctor", folder, *trusting(folder))
        with extra("The doctor", f"To see it again: {again}"):
            examine(folder)
        say(f"report: {write_report(folder).absolute()}")


@app.add(AFTERWARDS, "doctor runs/fedbn --json")
def doctor(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_STATE",
            help="Folder of a run, or file of a saved state.",
        ),
    ],
    max_examples: Annotated[
        int, typer.Option(min=2, help="Number of examples to use per client.")
    ] = 1024,
    json_: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of text.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            help="Exit with 1 if there is a finding, 3 if a part was not measured."
        ),
    ] = False,
    trust: Trust = False,
) -> None:
    """Find faults of BatchNorm in a run or in a saved state.

    Each finding has its evidence and a remedy.
    """
    path = Path(os.path.expanduser(target))
    # With --strict, the exit codes 1 and 3 report the result of the check, so a
    # StateError must not exit with one of them.
    with exit_codes(StateError), only_code_of(unless=trust), reading(path):
        if not path.exists():
            raise ConfigError(f"{target} is neither the folder of a run nor a file.")
        if path.is_dir():
            from fedbn_flwr.lab.diagnose_run import diagnose_run

            diagnosis = diagnose_run(path, max_examples)
        else:
            from fedbn_flwr.doctor import diagnose_state
            from fedbn_flwr.doctor.state import read_state_file

            diagnosis = diagnose_state(read_state_file(path))
        if json_:
            print(json.dumps(diagnosis.to_json(), indent=2))
        else:
            say(str(diagnosis))
    if strict and (diagnosis.findings or diagnosis.not_measured):
        raise typer.Exit(1 if diagnosis.findings else _NOT_KNOWN)
