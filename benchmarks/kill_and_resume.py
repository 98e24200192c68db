"""Kill runs by SIGKILL at random moments, resume them, and compare the final SHA-256
with the uninterrupted run's.

    python benchmarks/kill_and_resume.py                          # in process: 20 kills of each of the four methods
    python benchmarks/kill_and_resume.py --methods mtfl+fedadam   # methods in one run, see COMBINED

Each run has 40 rounds on scikit-learn's digits, 3 clients. A kill hits all processes of
the run, as a power cut does, at a moment drawn from the seed: one in eight while it
starts, the others in the first half of its rounds' time. Worker processes end by
themselves as soon as the command is killed. Then the run is resumed, and killed again,
until the kills are used up and the last run has ended. After every kill its folder is
read as a user would: whole JSON lines, checkpoints and client files whose SHA-256 fits,
and nothing half written under a name that is read. The table is printed as Markdown;
the exit code is 1 where a hash differs.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from measure import MARK, kill_marked
from safetensors import safe_open

from fedbn_flwr.checked_file import read_checked
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.files import read_metrics
from fedbn_flwr.lab.runs.run import run

METHODS = ("fedtan", "scaffold", "fedbn", "fixbn")
COMBINED = {
    "fixbn+fedprox": {"strategy": "fixbn", "client-hooks": "fedprox"},
    "fixbn+scaffold": {"strategy": "fixbn", "client-hooks": "scaffold"},
    "mtfl+fedadam": {"strategy": "mtfl", "server-step": "fedadam"},
    "fedbn+fedavgm": {"strategy": "fedbn", "server-step": "fedavgm"},
}
SETTINGS = {
    "num-clients": 3,
    "local-steps": 2,
    "batch-size": 16,
    "learning-rate": 0.2,
    "eval-every": 10,
}


def work(settings: dict[str, Any], out: Path, workers: int) -> None:
    """One command, in a process of its own: begin the run, or go on with it."""
    os.environ |= {
        MARK: out.name,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    logging.getLogger("flwr").setLevel(logging.ERROR)
    run(Config.make({**settings, "resume": True}), out, workers=workers)


def begin(settings: dict[str, Any], out: Path, workers: int) -> BaseProcess:
    # The fork server imports torch and Flower once for all commands.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["fedbn_flwr.lab.runs.run", "fedbn_flwr.lab.output.curves"]
    )
    process = context.Process(target=work, args=(settings, out, workers))
    process.start()
    return process


def kill(process: BaseProcess, name: str) -> None:
    """End all processes of a run, until there are none."""
    process.kill()
    kill_marked(name)
    process.join()


def check_folder(out: Path) -> None:
    """Read everything that has the name of a result: what is half written raises."""
    for path in out.glob("*.json"):
        json.loads(path.read_text())
    for path in out.glob("*.yaml"):
        Config.make(yaml.safe_load(path.read_text()))
    for path in out.glob("model.safetensors"):
        with safe_open(path, "numpy") as file:
            file.get_tensor(next(iter(file.keys())))
    for path in (out / "checkpoint").rglob("*.safetensors"):
        read_checked(path)
        if path.stat().st_mode & 0o777 != 0o600:
            raise RuntimeError(f"{path} is readable for others than its owner")


def wait(process: BaseProcess, out: Path, draw: random.Random, seconds: float) -> None:
    """Wait for the moment to kill a run whose rounds take ``seconds``; less where it
    ends before.
    """
    before = changed(out / "config.yaml")
    if draw.random() < 1 / 8:
        process.join(draw.uniform(0, 2))
        return
    while process.exitcode is None and changed(out / "config.yaml") == before:
        process.join(0.002)
    # The process has cut the file back to the checkpoint by now. The next line is its
    # first round.
    history = changed(out / "metrics.jsonl")
    while process.exitcode is None and changed(out / "metrics.jsonl") == history:
        process.join(0.002)
    process.join(draw.uniform(0, seconds / 2))


def changed(path: Path) -> float:
    return path.stat().st_mtime if path.is_file() else 0.0


def finish(process: BaseProcess, out: Path) -> dict[str, Any]:
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{out.name} ended with {process.exitcode}")
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def torment(
    method: str,
    settings: dict[str, Any],
    folder: Path,
    workers: int,
    kills: int,
    draw: random.Random,
) -> bool:
    """Kill and resume runs until ``kills`` are used up; print the row; return whether
    every hash was the same.
    """
    whole = folder / method
    expected = finish(begin(settings, whole, workers), whole)["sha256"]
    seconds = sum(line["seconds"] for line in read_metrics(whole / "metrics.jsonl")[1:])
    done, again, resumed, hashes = 0, 0, 0, list[str]()
    while done < kills or not hashes:
        out = folder / f"{method}-{len(hashes)}"
        ended = False
        while not ended:
            resumed += any((out / "checkpoint").glob("round-*.safetensors"))
            process = begin(settings, out, workers)
            if done < kills:
                wait(process, out, draw, seconds)
            else:
                process.join()
            ended = process.exitcode is not None
            if not ended:
                kill(process, out.name)
                done += 1
                stand = [
                    int(path.stem.split("-")[1])
                    for path in (out / "checkpoint").glob("round-*.safetensors")
                ]
                again += len(read_metrics(out / "metrics.jsonl")) - max(
                    stand, default=0
                )
            check_folder(out)
        hashes.append(finish(process, out)["sha256"])
    same = set(hashes) == {expected}
    cells = (
        method,
        done,
        resumed,
        len(hashes),
        again,
        "yes" if same else "NO",
        expected[:16],
    )
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    return same


def main(
    workers: Annotated[
        int, typer.Option(help="worker processes of the engine in-process", min=0)
    ] = 2,
    methods: Annotated[str, typer.Option(help="comma list")] = ",".join(METHODS),
    kills: Annotated[int, typer.Option(help="per method")] = 20,
    rounds: Annotated[int, typer.Option(help="of a run")] = 40,
    every: Annotated[int, typer.Option(help="checkpoint-every")] = 4,
    seed: Annotated[int, typer.Option(help="of the moments")] = 0,
) -> None:
    print(
        "| method | kills | resumed from a checkpoint | runs ended | rounds"
        " done again | same | SHA-256 |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    common = {**SETTINGS, "num-server-rounds": rounds, "checkpoint-every": every}
    # Use a short path, because Ray makes its sockets below it.
    with tempfile.TemporaryDirectory(prefix="kill-", dir="/tmp") as folder:
        same = [
            torment(
                m,
                {**common, **COMBINED.get(m, {"strategy": m})},
                Path(folder),
                workers,
                kills,
                random.Random(f"{seed} {m}"),
            )
            for m in methods.split(",")
        ]
    raise typer.Exit(0 if all(same) else 1)


if __name__ == "__main__":
    typer.run(main)
