"""``fedbn-flwr report``: a run or a study as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbn_flwr.lab.cli.console import app, exit_codes, interrupt, say


@app.command(epilog="Example: fedbn-flwr report runs/digits --out digits.html")
def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN_OR_STUDY", help="The --out of a run or a sweep.")],
    live: Annotated[bool, typer.Option("--live", help="Follow a running folder until it is finished.")] = False,
    out: Annotated[Path | None, typer.Option(help="File to write. Default: report.html in the folder.")] = None,
) -> None:
    """Write one HTML page of a run or a study, which needs no other file and no network."""
    from fedbn_flwr.lab.report import REPORT_FILE, follow_report, write_report

    target = out or folder / REPORT_FILE
    with exit_codes():
        if live:
            say(f"report, live: {target.absolute()}")
            with interrupt(lambda: f"The report shows the folder as it was last: {target}"):
                follow_report(folder, out)
        else:
            write_report(folder, out)
        say(f"report: {target.absolute()}")
