"""The results of a finished run on the screen, site by site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbn_flwr.lab.cli.console import say, say_table
from fedbn_flwr.lab.report.words import of_mean, of_mismatch
from fedbn_flwr.lab.results.files import read_json, site_label
from fedbn_flwr.lab.results.numbers import label_of, shown
from fedbn_flwr.lab.results.saved_model import fault_of_model
from fedbn_flwr.lab.results.sites import sites_of_run
from fedbn_flwr.lab.results.tests_table import metric_in

_FIGURES = ("value", "low", "high", "difference", "difference-low", "difference-high")


def print_results(run: Path, against: Path | None = None) -> None:
    """Print the sites of a run, maybe beside another run, their mean, and a warning if
    running statistics do not fit.

    Only the predictions are read, so the data may be elsewhere.

    Raises:
        ConfigError: a run has no predictions, or they are of other examples.
    """
    found, summary = sites_of_run(run, against), read_json(run / "summary.json")
    metric = metric_in(summary)
    _print_sites(found.rows, metric)
    say(of_mean(found, metric, summary["seed"], against))
    if any(row.get("low") is not None for row in found.rows):
        say("The interval in a row is for its site, not for the mean.")
    for folder in filter(None, (run, against)):
        for fault in filter(None, (of_mismatch(folder), fault_of_model(folder))):
            say(f"warning: {folder}: {fault}.", style="yellow")


def _print_sites(rows: Sequence[Mapping[str, Any]], metric: str) -> None:
    """Print a row for each site with its counts and its metric.

    Intervals and errors are included if there are any.
    """
    columns = ["examples", "groups", *_FIGURES, "error"]
    # A site without a name is called "client N", so only named sites need a column with
    # the numbers.
    if any(row["site"] != f"client {row.get('client', '-')}" for row in rows):
        columns.insert(0, "client")
    names = [name for name in columns if any(name in row for row in rows)]
    say_table(
        ["site", *(label_of(metric) if name == "value" else name for name in names)],
        (
            [site_label(row), *(_cell(name, row.get(name), metric) for name in names)]
            for row in rows
        ),
    )


def _cell(name: str, value: float | str | None, metric: str) -> str:
    if isinstance(value, str):
        return value
    sign = "+" if name.startswith("difference") else ""
    return shown(value, metric if name in _FIGURES else "", sign)
