"""``make demo``: the default app through ``flwr run`` and in process, in one table."""

from __future__ import annotations

import json
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from apps.flower_processes import flower_run
from fedbn_flwr.errors import FedBNError
from fedbn_flwr.lab.studies.check_study import load_study
from fedbn_flwr.lab.studies.study import Cell
from fedbn_flwr.lab.studies.sweep import LogFollower, sweep

__all__ = ["demo"]

_SHOWN = ("FedAvg+BN", "FixBN", "FedTAN", "FedAvg+GN")
_ONE_MACHINE = "one machine"
ROOT = Path(__file__).resolve().parents[2]


def demo(out: Path) -> int:
    """Run the demo into ``out``; return the exit code."""
    # Do the runs. Do the sweep during the run in Flower, because Flower mostly waits
    # for processes to start.
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
        with ThreadPoolExecutor(1) as beside:
            through_flower = beside.submit(_flower, first, out / "flwr-run", console)
            sweep(study, out, follower=_Printer(console))
            through_flower.result()
    except FedBNError as error:
        console.print(
            str(error), style="red", markup=False, highlight=False, soft_wrap=True
        )
        return 1

    # Show a table with a row for each run.
    folders = {f"{first.method} (flwr run)": out / "flwr-run"}
    folders |= {cell.method: cell.folder(out) for cell in study.cells()}
    columns = ("method", "accuracy, %", "rounds", "exchanges", "MB of floats")
    table = Table(*columns, title=study.name, title_justify="left")
    accuracies: dict[str, float] = {}
    hashes: list[str] = []
    for name, folder in folders.items():
        summary = json.loads((folder / "summary.json").read_text())
        accuracies[name] = 100 * summary["final"][summary["headline"]]
        hashes.append(summary["sha256"])
        ledger = summary["ledger"]
        megabytes = (ledger["bytes-down"] + ledger["bytes-up"]) / 2**20
        table.add_row(
            name,
            f"{accuracies[name]:.2f}",
            str(summary["rounds"]),
            f"{ledger['exchanges']:,}",
            f"{megabytes:.2f}",
        )
    console.print(table)

    # Say what the table shows. The first two runs differ only in their engine.
    best = accuracies[_ONE_MACHINE]
    behind = [f"{name} {best - accuracies[name]:.1f}" for name in _SHOWN]
    sentence = f"Accuracy behind one machine, in points: {', '.join(behind)}."
    console.print(sentence, highlight=False, soft_wrap=True)
    same = hashes[0] == hashes[1]
    answer = "yes" if same else "NO"
    console.print(f"flwr run and in process end in the same bits: {answer}")
    for name in ("table.md", "results.csv"):
        console.print(str(out / name), highlight=False, soft_wrap=True)
    return 0 if same else 1


class _Printer(LogFollower):
    """Prints a line when a run begins."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = 0

    def plan(self, name: str, left: int) -> None:
        self._left = left

    def begin(self, cell: Cell) -> None:
        self._begun += 1
        self._console.print(f"   in process, {self._begun}/{self._left}: {cell.method}")


def _flower(cell: Cell, out: Path, console: Console) -> None:
    """Run a cell of the study with the app at the root of the repository."""
    nodes = cell.config.num_clients

    def show(line: str) -> None:
        # Show only the lines of rounds, without Flower's colours and times.
        if "test-accuracy" in line and "/" in line:
            text = f"   flwr run, {line[line.index('round') :]}"
            console.print(text, markup=False, highlight=False)

    flower_run(
        ROOT,
        run_config={**cell.config.to_mapping(), "out": str(out)},
        federation_config={"num-supernodes": nodes, "client-resources-num-cpus": 1},
        on_line=show,
    )


if __name__ == "__main__":
    sys.exit(demo(Path.cwd() / "runs" / f"demo-{datetime.now():%Y%m%d-%H%M%S}"))
