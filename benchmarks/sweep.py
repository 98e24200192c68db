"""Measure sweeps: several runs at a time against one after another, and a sweep that is killed again and again.

    python benchmarks/sweep.py --write docs/performance.md      # all, some 70 minutes on two quiet cores
    python benchmarks/sweep.py --no-kills --no-cluster          # the times alone
    python benchmarks/sweep.py --no-times --no-cluster          # the kills alone
    python benchmarks/sweep.py --no-times --no-kills            # on two Ray nodes that are started here

The timed study has eight equal runs: LeNet on scikit-learn's digits, 5 clients with two classes each. Each time is
that of the whole command: one run after another on one core, the same on both (a run's clients are then on two), and
two runs at a time. A kill is SIGKILL to all processes of the sweep, at a moment drawn from the seed; then the
same command is given again, until all kills are used up and the sweep ends by itself. Its tables must be those of a
sweep that was never killed, byte for byte; so must those of the cluster, and those of runs in series. The command
fails otherwise, and if two runs at a time take more than 0.6 of the time on one core.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
import yaml
from measure import MARK, ROOT, facts, kill_marked, table, write_block

COMPARISONS = "comparisons.csv"  # only of two methods or more
FILES = ("results.jsonl", "results.csv", "table.md", "table.csv", COMPARISONS, "study.yaml")
LARGEST_RATIO = 0.6  # of two runs at a time to one after another on one core: the command fails above it
BASE = {
    "dataset": "digits",
    "model": "lenet",
    "num-clients": 5,
    "partition": "classes",
    "classes-per-client": 2,
    "local-steps": 10,
    "batch-size": 32,
    "learning-rate": 0.05,
    "eval-every": 10,
    "checkpoint-every": 5,
}


def study(folder: Path, num_rounds: int, methods: dict[str, dict[str, object]], seeds: list[int]) -> Path:
    path = folder / f"study-{num_rounds}-{len(seeds)}.yaml"
    content = {"name": "sweep", "base": {**BASE, "num-server-rounds": num_rounds}, "methods": methods, "seeds": seeds}
    path.write_text(yaml.safe_dump({**content, "target": 60}))
    return path


def start(path: Path, out: Path, *options: str, cores: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    sweep = [sys.executable, "-c", "from fedbn_flwr.lab.cli import main; main()", "sweep", str(path), "--out", str(out)]
    environment = {**os.environ, MARK: out.name, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*cores, *sweep, *options], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def seconds(path: Path, out: Path, *options: str, cores: Sequence[str] = ()) -> float:
    began = time.monotonic()
    if code := start(path, out, *options, cores=cores).wait():
        raise SystemExit(f"the sweep in {out} ended with {code}")
    return time.monotonic() - began


def kill(process: subprocess.Popen[bytes], name: str) -> None:
    """End all processes of a sweep, until there are none."""
    process.kill()
    process.wait()
    kill_marked(name)


def same(one: Path, other: Path) -> bool:
    """Whether two sweeps wrote the same tables, byte for byte."""
    written = [name for name in FILES if name != COMPARISONS or (one / name).exists() or (other / name).exists()]
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in written)


def times(folder: Path, num_rounds: int, turns: int) -> tuple[str, bool]:
    path = study(folder, num_rounds, {"FedAvg": {"strategy": "fedavg"}}, list(range(8)))
    one_core, both, two_runs = "one after another, one core", "one after another, two cores", "two at a time"
    options = {one_core: "1", both: "1", two_runs: "2"}
    found: dict[str, list[float]] = {way: [] for way in options}
    for turn in range(turns):
        for way, parallel in list(options.items())[:: 1 if turn % 2 == 0 else -1]:
            cores = ["taskset", "--cpu-list", "0"] if way == one_core else []
            found[way].append(seconds(path, folder / f"{way}-{turn}", "--parallel", parallel, cores=cores))
            print(f"{way}: {found[way][-1]:.1f} s", file=sys.stderr, flush=True)
    rows, ratios = [], {}
    for way, times_of in found.items():
        each = [one / alone for one, alone in zip(times_of, found[one_core], strict=True)]
        ratios[way] = statistics.median(each)
        equal = same(folder / f"{one_core}-0", folder / f"{way}-0")
        of_turns = ", ".join(f"{ratio:.2f}" for ratio in each)
        rows.append([way, f"{statistics.median(times_of):.0f}", f"{ratios[way]:.2f} ({of_turns})"])
        rows[-1].append("yes" if equal else "NO")
    good = all(row[-1] == "yes" for row in rows) and ratios[two_runs] <= LARGEST_RATIO
    return table(["8 runs", "seconds", "to one core (each turn)", "same tables, byte for byte"], rows), good


def kills(folder: Path, number: int, seed: int) -> tuple[str, bool]:
    methods: dict[str, dict[str, object]] = {
        "FedAvg": {"strategy": "fedavg"},
        "FedBN": {"strategy": "fedbn"},
        "FedTAN-II": {"strategy": "fedtan2", "fedtan-rounds": 5},
        "FixBN": {"strategy": "fixbn", "freeze-at": 0.5},
    }
    path = study(folder, 60, methods, [0, 1])
    span = seconds(path, folder / "whole", "--parallel", "2")
    draw, out, hit = random.Random(seed), folder / "killed", 0
    while True:
        process = start(path, out, "--parallel", "2")
        try:
            process.wait(draw.uniform(0.12, 0.24) * span if hit < number else None)
        except subprocess.TimeoutExpired:
            kill(process, out.name)
            hit += 1
            done = len(list(out.glob("*/*/*/summary.json")))
            print(f"kill {hit}: {done} of 8 runs finished", file=sys.stderr, flush=True)
            continue
        if process.returncode:
            raise SystemExit(f"the sweep in {out} ended with {process.returncode}")
        break
    resumed = sum("resumed-after" in path.read_text() for path in out.glob("*/*/*/summary.json"))
    equal = same(folder / "whole", out)
    rows = [[f"8 runs of 4 methods, {hit} kills", f"{resumed} runs were resumed", "yes" if equal else "NO"]]
    return table(["sweep", "", "same tables, byte for byte"], rows), equal and hit == number


def on_cluster(folder: Path) -> tuple[str, bool]:
    """Two Ray nodes on this machine, a core each."""
    path = study(folder, 20, {"FedAvg": {"strategy": "fedavg"}, "FedBN": {"strategy": "fedbn"}}, [0, 1])
    seconds(path, folder / "series", "--parallel", "1")
    ray = [str(Path(sys.executable).parent / "ray"), "start", "--num-cpus=1", "--disable-usage-stats", "--block"]
    address, environment = "127.0.0.1:26379", {**os.environ, MARK: "ray-nodes"}
    nodes = [[*ray, "--head", "--port=26379", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]]
    nodes.append([*ray, f"--address={address}", "--node-ip-address=127.0.0.2"])
    running = []
    try:
        for command in nodes:
            running.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
            time.sleep(8)
        seconds(path, folder / "cluster", "--ray-address", address)
    finally:
        for process in running:
            process.terminate()
        time.sleep(3)
        for process in running:
            kill(process, "ray-nodes")
    equal = same(folder / "series", folder / "cluster")
    rows = [["4 runs on two Ray nodes, a core each", "yes" if equal else "NO"]]
    return table(["sweep", "same tables as in series, byte for byte"], rows), equal


def main(
    write: Annotated[Path | None, typer.Option(help="Page that gets the tables.")] = None,
    times_: Annotated[bool, typer.Option("--times/--no-times", help="Measure the times.")] = True,
    kills_: Annotated[int, typer.Option("--kills", min=0, help="Kills; 0 = none.")] = 10,
    no_kills: Annotated[bool, typer.Option("--no-kills", help="No kills.")] = False,
    cluster: Annotated[bool, typer.Option("--cluster/--no-cluster", help="Two Ray nodes.")] = True,
    rounds: Annotated[int, typer.Option(help="Rounds of the timed runs.")] = 200,
    turns: Annotated[int, typer.Option(help="Turns of the timed sweeps.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the moments of the kills.")] = 0,
) -> None:
    """Measure, print the tables and, with --write, put them on the page."""
    with tempfile.TemporaryDirectory() as name:
        folder, timed, others = Path(name), [], []
        if times_:
            timed.append(times(folder, rounds, turns))
        if kills_ and not no_kills:
            others.append(kills(folder, kills_, seed))
        if cluster:
            others.append(on_cluster(folder))
    for block, found in (("sweep-times", timed), ("sweep", others)):
        if found:
            text = "\n\n".join([*(text for text, _ in found), facts()])
            print(text)
            if write:
                write_block(write, block, text)
    if not all(good for _, good in (*timed, *others)):
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
