"""What a start costs: imports, a trivial run up to the end of its first round, and
commands that only answer.

    python benchmarks/startup.py                  # imports, and runs in process
    python benchmarks/startup.py --simulation     # also Flower's simulation, ours and a stock `flwr run`; minutes

Imports and runs are ratios measured in one run. Every number is the median over fresh
processes, which take turns; each finds all modules compiled, as those of an installed
package are: a first process of each kind, which compiles them, is not counted. The
trivial run: FedAvg on the embedded digits, 5 clients, an MLP, one round. It ends for
this table when its first line is in ``metrics.jsonl``; the stock app, whose clients
train a linear layer on random numbers, when its server tests the model of round 1.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from measure import ROOT, facts, flower_project, table, write_block

BASE = "import torch, flwr"
RUN = [
    "run",
    "--set",
    "strategy=fedavg",
    "--set",
    "dataset=digits",
    "--set",
    "num-server-rounds=1",
]

_MAIN = "from fedbn_flwr.lab.cli import main; main()"
ANSWERS = (
    "--help",
    "--version",
    "run --help",
    "list strategies",
    "run --set sed=1",
    "run --set strategy=fedbnn",
)

_STOCK_APP = """import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message, context):
    layer = torch.nn.Linear(64, 10)
    layer.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    torch.nn.functional.cross_entropy(layer(torch.randn(32, 64)), torch.randint(10, (32,))).backward()
    optimizer.step()
    metrics = MetricRecord({"num-examples": 32})
    return Message(RecordDict({"arrays": ArrayRecord(layer.state_dict()), "metrics": metrics}), reply_to=message)


@server_app.main()
def main(grid, context):
    def test(server_round, arrays):
        if server_round:
            Path(context.run_config["done"]).touch()

    strategy = FedAvg(fraction_evaluate=0.0)
    strategy.start(grid, ArrayRecord(torch.nn.Linear(64, 10).state_dict()), num_rounds=1, evaluate_fn=test)
"""

_CONFIG = """
done = ""
"""


class Cost(NamedTuple):
    """What a process took: seconds by the clock, seconds of the CPU, and its largest
    memory in MB.
    """

    seconds: float
    cpu: float
    megabytes: float


def cost(*arguments: str) -> Cost:
    """Return what a fresh interpreter with these arguments costs; its output and its
    exit code are not looked at.
    """
    start = time.perf_counter()
    nowhere = [
        (os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)
    ]
    child = os.posix_spawn(
        sys.executable, [sys.executable, *arguments], os.environ, file_actions=nowhere
    )
    used = os.wait4(child, 0)[2]
    return Cost(
        time.perf_counter() - start,
        used.ru_utime + used.ru_stime,
        used.ru_maxrss / 1024,
    )


def importing(statement: str) -> float:
    """Return the seconds of the CPU that a fresh process takes to import something."""
    return cost("-c", statement).cpu


def first_round(*arguments: str) -> float:
    """Return the seconds from the command ``fedbn-flwr`` to the end of its run's first
    round.
    """
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        command = [
            sys.executable,
            "-c",
            _MAIN,
            *arguments,
            "--out",
            f"{folder}/out",
        ]
        start = time.time()
        subprocess.run(command, check=True, capture_output=True)
        return (Path(folder) / "out/metrics.jsonl").stat().st_mtime - start


def stock_round() -> float:
    """Return the seconds from `flwr run` to the end of the first round of an app that
    does not use this package.
    """
    from apps.flower_processes import flower_run

    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        app, done = Path(folder) / "app", Path(folder) / "done"
        app.mkdir()
        (app / "stock.py").write_text(_STOCK_APP)
        (app / "pyproject.toml").write_text(
            flower_project("stock", "stock", "stock", _CONFIG)
        )
        start = time.time()
        flower_run(
            app, run_config={"done": str(done)}, federation_config={"num-supernodes": 5}
        )
        return done.stat().st_mtime - start


def answers(turns: int) -> str:
    """Return the table of the commands that only answer."""
    rows = []
    # A config is checked with the methods, which import torch.
    targets = ("<= 0.3 s, 80 MB", "<= 4 s")
    for command in ANSWERS:
        costs = [cost("-c", _MAIN, *command.split()) for _ in range(turns + 1)][1:]
        seconds, cpu, megabytes = (
            statistics.median(values) for values in zip(*costs, strict=True)
        )
        rows.append(
            [
                f"fedbn-flwr {command}",
                f"{seconds:.2f}",
                f"{cpu:.2f}",
                f"{megabytes:.0f}",
                targets[command.startswith("run --set")],
            ]
        )
    return table(["command", "seconds", "CPU seconds", "MB", "target"], rows)


def main(
    turns: Annotated[int, typer.Option(min=1, help="fresh processes of each kind")] = 7,
    simulation: Annotated[
        bool, typer.Option(help="also in Flower's simulation")
    ] = False,
    write: Annotated[
        Path | None, typer.Option(help="a page with the block 'startup'")
    ] = None,
) -> None:
    """Measure what imports and the start of a run cost beside importing torch and
    Flower.
    """
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory(prefix="startup-bytecode-") as bytecode:
        os.environ["PYTHONPYCACHEPREFIX"] = bytecode
        text = measured(turns, simulation)
    print(text)
    if write is not None:
        write_block(write, "startup", text)


def measured(turns: int, simulation: bool) -> str:
    """Return the two tables."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    ways: dict[str, tuple[Callable[[], float], str]] = {
        BASE: (lambda: importing(BASE), ""),
        "import fedbn_flwr": (lambda: importing("import fedbn_flwr"), ""),
        "import fedbn_flwr.app, as every actor of Ray does": (
            lambda: importing("import fedbn_flwr.app"),
            "<= 1.08",
        ),
        "fedbn-flwr run, end of round 1": (lambda: first_round(*RUN), "<= 1.5"),
        "the same, partition=iid": (
            lambda: first_round(*RUN, "--set", "partition=iid"),
            "<= 1.5",
        ),
    }
    if simulation:
        ways["flwr run of a stock app"] = stock_round, ""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
            seconds[name].append(ways[name][0]())
            print(f"{name}: {seconds[name][-1]:.2f} s", file=sys.stderr, flush=True)
    medians = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    rows = [
        [name, f"{medians[name]:.2f}", f"{medians[name] / medians[BASE]:.2f}", target]
        for name, (_, target) in ways.items()
    ]
    starts = table(["fresh process", "seconds", f"/ {BASE}", "target"], rows)
    return (
        f"{starts}\n\n{answers(turns)}\n\nImports are seconds of the CPU. Medians of"
        f" {turns}. {facts()}"
    )


if __name__ == "__main__":
    typer.run(main)
