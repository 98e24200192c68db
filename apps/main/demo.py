"""``make demo``: the default app through ``flwr run``, the same setting in process, and
one table.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedbn_flwr.engines.flower_run import flower_run
from fedbn_flwr.errors import FedBNError
from fedbn_flwr.lab.studies.study import Cell
from fedbn_flwr.lab.studies.study_checks import load_study
from fedbn_flwr.lab.studies.sweep import LogFollower, sweep

__all__ = ["demo"]

_PLAIN, _REPAIRS, _ONE_MACHINE = (
    "FedAvg+BN",
    ("FixBN", "FedTAN", "FedAvg+GN"),
    "one machine",
)
ROOT = Path(__file__).resolve().parents[2]


def demo(out: Path) -> int:
    """Run the demo into ``out``; return the exit code."""
    console = Console()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    study = load_study(ROOT / "apps/main/recipes/demo.yaml")
    first = next(study.cells())
    try:
        console.print(
            f"{first.method} through `flwr run` (Flower's Ray simulation, 5"
            " SuperNodes);"
        )
        console.print(
            "at the same time the same setting in process, and the other methods ..."
        )
        # Flower waits for processes to start more than it computes
        with ThreadPoolExecutor(1) as beside:
            through_flower = beside.submit(_flower, first, out / "flwr-run", console)
            sweep(study, out, follower=_Printer(console))
            through_flower.result()
    except FedBNError as error:
        console.print(
            str(error), style="red", markup=False, highlight=False, soft_wrap=True
        )
        return 1
    folders = {f"{first.method} (flwr run)": out / "flwr-run"}
    folders |= {cell.method: cell.folder(out) for cell in study.cells()}
    summaries = {
        name: json.loads((folder / "summary.json").read_text())
        for name, folder in folders.items()
    }
    columns = ("method", "accuracy, %", "rounds", "exchanges", "MB of floats")
    table = Table(*columns, title=study.name, title_justify="left")
    accuracies = {
        name: 100 * summary["final"][summary["headline"]]
        for name, summary in summaries.items()
    }
    for name, summary in summaries.items():
        ledger = summary["ledger"]
        megabytes = (ledger["bytes-down"] + ledger["bytes-up"]) / 2**20
        row = (
            f"{accuracies[name]:.2f}",
            str(summary["rounds"]),
            f"{ledger['exchanges']:,}",
            f"{megabytes:.2f}",
        )
        table.add_row(name, *row)
    console.print(table)
    console.print(_what_it_shows(accuracies), highlight=False, soft_wrap=True)
    hashes = [summary["sha256"] for summary in list(summaries.values())[:2]]
    console.print(
        "flwr run and in process end in the same bits:"
        f" {'yes' if hashes[0] == hashes[1] else 'NO'}"
    )
    for name in ("table.md", "results.csv", "flwr-run/curves.png"):
        console.print(str(out / name), highlight=False, soft_wrap=True)
    return 0 if hashes[0] == hashes[1] else 1


def _what_it_shows(accuracies: Mapping[str, float]) -> str:
    """Return what the table shows, in a sentence."""
    best = accuracies[_ONE_MACHINE]
    behind = [f"{name} {best - accuracies[name]:.1f}" for name in (_PLAIN, *_REPAIRS)]
    return f"Accuracy behind one machine, in points: {', '.join(behind)}."


class _Printer(LogFollower):
    """Prints a line when a run begins."""

    def __init__(self, console: Console) -> None:
        self._console, self._begun = console, 0

    def plan(self, cells: Sequence[Cell], left: Sequence[Cell]) -> None:
        self._left = len(left)

    def begin(self, cell: Cell) -> None:
        self._begun += 1
        self._console.print(f"   in process, {self._begun}/{self._left}: {cell.method}")


def _flower(cell: Cell, out: Path, console: Console) -> None:
    """Run a cell of the study with the app at the root of the repository."""
    nodes = cell.config.num_clients

    def show(line: str) -> None:
        if "test-accuracy" in line and "/" in line:
            console.print(
                f"   flwr run, {line[line.index('round') :]}",
                markup=False,
                highlight=False,
            )

    flower_run(
        ROOT,
        run_config={**cell.config.to_mapping(), "out": str(out)},
        federation_config={"num-supernodes": nodes, "client-resources-num-cpus": 1},
        on_line=show,
    )


if __name__ == "__main__":
    sys.exit(demo(Path.cwd() / "runs" / f"demo-{datetime.now():%Y%m%d-%H%M%S}"))
