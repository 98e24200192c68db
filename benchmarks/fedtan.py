"""How fast FedTAN is, as ratios measured side by side in one run on the same work.

    python benchmarks/fedtan.py                                   # in process, against FedAvg and against bare torch
    python benchmarks/fedtan.py --ray                             # also Flower's Ray simulation, five actors
    python benchmarks/fedtan.py --repetitions 0 --network         # five SuperNodes on loopback, and nothing else
    python benchmarks/fedtan.py --repetitions 0 --floor 2         # two nodes: exchanges by messages, empty queries
    python benchmarks/fedtan.py --data-dir DIR --reference REPO   # also two rounds of the authors' script

ResNet-20, five clients, E = 5 steps on batches of 128 a round; random images of
CIFAR-10's shape, or CIFAR-10 itself (``--data-dir``: the folder that holds
``cifar-10-batches-py``). All that is compared takes turns, and medians are shown. Bare
torch: the round's 25 steps with their batches, no federation, on all cores, the fastest
of three ways. ``--reference``: a working copy of github.com/wangyanmeng/FedTAN, which
reads CIFAR-10 from ``--data-dir``; it takes minutes, so FedTAN's rounds right before
and right after it stand beside it, whatever else the machine does by then; the script's
are in float32, ours in float32 and once more under bfloat16 autocast (``amp=true``).
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import typer
from fedtan_work import (
    CLIENTS,
    NOTHING,
    PARTS,
    STEPS,
    bare_steps,
    make_client_app,
    make_strategy,
    round_seconds,
)
from measure import facts, flower_project, table, write_block

from apps.flower_processes import Scalar, flower_run
from apps.local_federation import LocalFederation, make_certificates
from fedbn_flwr import InProcessGrid
from fedbn_flwr.messages.protocol import EXCHANGE_QUERY

Times = dict[str, list[float]]
Floor = dict[str, dict[str, list[Any]]]
"""``seconds`` and ``parts``, by message type; see ``fedtan_work.FloorGrid``."""
WORK = CLIENTS * STEPS
_PORT = 28000  # port of the SuperLink
_EVERY = 3  # send an empty query before every third exchange

_APP = """from fedtan_work import make_client_app, make_server_app

server_app = make_server_app()
client_app = make_client_app({data_dir!r})
"""

_CONFIG = """
strategy = "fedavg"
exchange = ""
rounds = 1
times = ""
bind = "127.0.0.1:0"
tls-dir = ""
exchanges = "3L+1"
floor = 0
clients = 5
"""

Runs = Mapping[str, tuple[str, str, int]]
"""Name of a measurement to strategy, carrier of FedTAN's exchanges, and rounds (0: the
first alone).
"""


def in_process(name: str, rounds: int, data_dir: str, amp: bool = False) -> list[float]:
    """Return the seconds of each round on a worker process for each core, one torch
    thread a client.
    """
    with InProcessGrid(
        make_client_app(data_dir, amp), CLIENTS, workers=os.cpu_count() or 1
    ) as grid:
        return round_seconds(make_strategy(name), grid, rounds)


def bare(pool: Executor, workers: int, threads: int, data_dir: str) -> float:
    """Return the seconds of the round's 25 steps, dealt out to the workers as evenly as
    can be.
    """
    shares = [WORK // workers + (i < WORK % workers) for i in range(workers)]
    start = time.perf_counter()
    futures = [pool.submit(bare_steps, n, threads, data_dir) for n in shares]
    done = sum(future.result() for future in futures)
    if done != WORK:
        raise RuntimeError(f"{done} steps done, {WORK} wanted")
    return time.perf_counter() - start


def side_by_side(repetitions: int, rounds: int, data_dir: str) -> Times:
    """Measure FedAvg, FedTAN and the bare steps in turns."""
    cores, spawn = os.cpu_count() or 1, multiprocessing.get_context("spawn")
    times: Times = {}
    with ExitStack() as stack:
        one = stack.enter_context(ProcessPoolExecutor(1, spawn))
        many = stack.enter_context(ProcessPoolExecutor(cores, spawn))
        threads = stack.enter_context(ThreadPoolExecutor(cores))
        ways: Mapping[str, Callable[[], list[float]]] = {
            "in process, FedAvg": lambda: in_process("fedavg", rounds, data_dir),
            "in process, FedTAN": lambda: in_process("fedtan", rounds, data_dir),
            f"bare torch, one process, {cores} torch threads": lambda: [
                bare(one, 1, cores, data_dir)
            ],
            f"bare torch, {cores} processes, one torch thread each": lambda: [
                bare(many, cores, 1, data_dir)
            ],
            f"bare torch, {cores} threads, one torch thread each": lambda: [
                bare(threads, cores, 1, data_dir)
            ],
        }
        for pool, workers in ((one, 1), (many, cores), (threads, cores)):
            # Start the workers and let them import torch before the measurement.
            list(pool.map(bare_steps, [1] * workers, [1] * workers))
        for turn in range(repetitions):
            order = list(ways)[:: 1 if turn % 2 == 0 else -1]
            for name in order:
                times.setdefault(name, []).extend(way_times := ways[name]())
                print(
                    f"{name}: {statistics.median(way_times):.2f} s",
                    file=sys.stderr,
                    flush=True,
                )
    return times


def in_ray(rounds: int, data_dir: str) -> Times:
    """Measure FedAvg, FedTAN by channel and FedTAN by messages in Ray, each with five
    actors.
    """
    runs: Runs = {
        "Ray, FedAvg": ("fedavg", "", rounds),
        "Ray, FedTAN by channel": ("fedtan", "channel", rounds),
        "Ray, FedTAN by messages": ("fedtan", "messages", 1),
    }
    federation: dict[str, Scalar] = {
        "num-supernodes": CLIENTS,
        "client-resources-num-cpus": 1,
        "init-args-num-cpus": CLIENTS,
    }

    def run(app: Path, config: Mapping[str, Scalar]) -> None:
        flower_run(app, run_config=config, federation_config=federation)

    return timed_runs(runs, run, data_dir)


def in_network(
    rounds: int, data_dir: str, nodes: int = CLIENTS, only_messages: bool = False
) -> tuple[Times, Floor]:
    """Measure FedAvg, FedTAN by channel and one round of FedTAN by messages over
    SuperNodes on loopback.

    TLS, node keys and secrets are on, for the channel too. By messages the round is the
    run's first, with the query: one exchange more of 58. Before every third exchange
    the same nodes and the same app answer an empty query, which is what Flower alone
    takes; the round's seconds are without these. ``only_messages``: that alone, in 2L+1
    exchanges.
    """
    runs: Runs = {
        "network, FedAvg": ("fedavg", "", rounds),
        "network, FedTAN by channel": ("fedtan", "channel", rounds),
        "network, FedTAN by messages": ("fedtan", "messages", 0),
    }
    if only_messages:
        runs = dict(list(runs.items())[-1:])
    floor: Floor = {}
    with (
        tempfile.TemporaryDirectory(prefix="fedtan-benchmark-") as name,
        ExitStack() as stack,
    ):
        certs = Path(name) / "certs"
        make_certificates(certs, nodes)
        deployment = stack.enter_context(
            closing(LocalFederation(Path(name) / "net", certs, nodes, _PORT, ()))
        )
        deployment.start()
        channel: dict[str, Scalar] = {
            "bind": f"127.0.0.1:{_PORT + 100}",
            "tls-dir": str(certs / "channel"),
        }

        def run(app: Path, config: Mapping[str, Scalar]) -> None:
            by_messages = config["exchange"] == "messages"
            own = {"clients": nodes, "exchanges": "2L+1" if only_messages else "3L+1"}
            deployment.run(
                {**config, **channel, **own, "floor": _EVERY if by_messages else 0}, app
            )
            if by_messages:
                floor.update(
                    json.loads(
                        Path(str(config["times"])).with_suffix(".floor").read_text()
                    )
                )

        stack.enter_context(restarting(deployment))
        return timed_runs(runs, run, data_dir), floor


@contextmanager
def restarting(deployment: LocalFederation) -> Iterator[None]:
    """Start processes again that end, as the compose file's restart policy does.

    The SuperExec ends where the SuperLink answers 500, and that it does where its
    database stays locked for 5 seconds.
    """
    over = threading.Event()

    def work() -> None:
        while not over.wait(1):
            deployment.restart_dead()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def timed_runs(
    runs: Runs, run: Callable[[Path, Mapping[str, Scalar]], None], data_dir: str
) -> Times:
    """Return the seconds of the rounds of each run of the benchmark's Flower app."""
    times: Times = {}
    with tempfile.TemporaryDirectory(prefix="fedtan-benchmark-") as folder:
        app, found = Path(folder) / "app", Path(folder) / "times.json"
        app.mkdir()
        shutil.copy(Path(__file__).with_name("fedtan_work.py"), app)
        (app / "benchmark_app.py").write_text(_APP.format(data_dir=data_dir))
        (app / "pyproject.toml").write_text(
            flower_project(
                "fedtan-benchmark", "benchmark_app", "benchmark_app", _CONFIG
            )
        )
        for name, (strategy, exchange, count) in runs.items():
            found.unlink(missing_ok=True)
            run(
                app,
                {
                    "strategy": strategy,
                    "exchange": exchange,
                    "rounds": count,
                    "times": str(found),
                },
            )
            times[name] = json.loads(found.read_text())
            print(
                f"{name}: {statistics.median(times[name]):.2f} s",
                file=sys.stderr,
                flush=True,
            )
    return times


def authors_rounds(repository: Path, data_dir: str, rounds: int = 2) -> list[float]:
    """Return the seconds of the first rounds of the authors' script, read off its
    progress bar.

    It runs in a copy of the repository and is ended after the last round; evaluation
    before round 1 is not counted.

    Raises:
        RuntimeError: it ended before; with the last lines of its log.
    """
    with tempfile.TemporaryDirectory(prefix="fedtan-reference-") as folder:
        copy = Path(folder) / "repository"
        shutil.copytree(repository, copy, ignore=shutil.ignore_patterns(".git", "data"))
        (copy / "data").symlink_to(Path(data_dir).resolve())
        command = [
            sys.executable,
            "FedTAN.py",
            "--epochs",
            str(rounds),
            "--momentum",
            "0",
            "--weight_decay",
            "0",
        ]
        process = subprocess.Popen(
            command, cwd=copy, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            seen: dict[int, float] = {}
            tail = ""
            for text in _pieces(process):
                tail = (tail + text)[-4000:]
                for done in re.findall(rf"\b(\d+)/{rounds} \[", tail):
                    seen.setdefault(int(done), time.perf_counter())
                if rounds in seen:
                    return [seen[i + 1] - seen[i] for i in range(rounds)]
            raise RuntimeError(
                f"the authors' script ended after {len(seen)} marks of"
                f" {rounds + 1}:\n{tail}"
            )
        finally:
            process.kill()
            process.wait()


def _pieces(process: subprocess.Popen[bytes]) -> Iterator[str]:
    if process.stderr is not None:
        while piece := os.read(process.stderr.fileno(), 4096):
            yield piece.decode(errors="replace")


def ratios(times: Mapping[str, float]) -> dict[str, tuple[float, str]]:
    """Return each ratio that was measured, with its target."""
    found: dict[str, tuple[float, str]] = {}
    if "in process, FedTAN" in times:
        tan, average = times["in process, FedTAN"], times["in process, FedAvg"]
        floor = min(
            seconds for name, seconds in times.items() if name.startswith("bare")
        )
        found["in process: FedTAN / FedAvg"] = (tan / average, "<= 1.10")
        found["bare torch / in process FedTAN"] = (floor / tan, ">= 0.85")
        found["bare torch / in process FedAvg"] = (floor / average, "")
    if "Ray, FedAvg" in times:
        ray = times["Ray, FedAvg"]
        found["Ray: FedTAN by channel / FedAvg"] = (
            times["Ray, FedTAN by channel"] / ray,
            "<= 1.5",
        )
        found["Ray: FedTAN by messages / FedAvg"] = (
            times["Ray, FedTAN by messages"] / ray,
            "",
        )
    if "an empty query, median" in times:
        ratio = times["an exchange of FedTAN, median"] / times["an empty query, median"]
        found["network: FedTAN's exchange by messages / an empty query"] = (
            ratio,
            "<= 1.2",
        )
    if "network, FedAvg" in times:
        channel = times["network, FedTAN by channel"]
        found["network: FedTAN by channel / FedAvg"] = (
            channel / times["network, FedAvg"],
            "<= 2",
        )
        found["network: FedTAN by messages / by channel"] = (
            times["network, FedTAN by messages"] / channel,
            ">= 20",
        )
    if "the authors' script" in times:
        for name, target in (("FedTAN", ">= 25"), ("FedTAN in bfloat16", "")):
            ratio = (
                times["the authors' script"] / times[f"in process, {name}, around it"]
            )
            found[f"the authors' script / in process {name}"] = (ratio, target)
    return found


def main(
    repetitions: Annotated[
        int,
        typer.Option(
            min=0, help="turns of the measurements in process and in bare torch"
        ),
    ] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="rounds timed in each turn")] = 2,
    data_dir: Annotated[
        str,
        typer.Option(help="folder with cifar-10-batches-py; random images without it"),
    ] = "",
    ray: Annotated[bool, typer.Option(help="also in Flower's Ray simulation")] = False,
    network: Annotated[
        bool, typer.Option(help="also over 5 SuperNodes on loopback; many minutes")
    ] = False,
    floor: Annotated[
        int,
        typer.Option(
            min=0, help="SuperNodes for exchanges by messages beside empty queries"
        ),
    ] = 0,
    reference: Annotated[
        str,
        typer.Option(
            help="a working copy of the authors' repository; needs --data-dir"
        ),
    ] = "",
    out: Annotated[Path, typer.Option(help="JSON file for the figures")] = Path(
        "runs/benchmark-fedtan.json"
    ),
    write: Annotated[
        Path | None, typer.Option(help="a page with the block 'fedtan'")
    ] = None,
) -> None:
    """Measure FedTAN against FedAvg and bare torch; on request in Ray, over a network,
    against the authors' script.
    """
    if reference and not data_dir:
        raise typer.BadParameter(
            "--reference needs --data-dir: the authors' script trains on CIFAR-10"
        )
    logging.getLogger("flwr").setLevel(logging.WARNING)
    data_dir = str(Path(data_dir).resolve()) if data_dir else ""
    times = side_by_side(repetitions, rounds, data_dir) if repetitions else {}
    if ray:
        times |= in_ray(rounds * 2, data_dir)
    parts: dict[str, list[list[float]]] = {}
    if network or floor:
        network_times, measured = in_network(
            rounds, data_dir, floor or CLIENTS, floor > 0
        )
        times |= network_times
        for name, kind in (
            ("an exchange of FedTAN, median", EXCHANGE_QUERY),
            ("an empty query, median", NOTHING),
        ):
            times[name], parts[name] = (
                measured["seconds"][kind],
                measured["parts"][kind],
            )
    if reference:
        around = {
            "in process, FedTAN, around it": False,
            "in process, FedTAN in bfloat16, around it": True,
        }
        for name, amp in around.items():
            times[name] = in_process("fedtan", rounds, data_dir, amp)
        times["the authors' script"] = authors_rounds(Path(reference), data_dir)
        for name, amp in around.items():
            times[name] += in_process("fedtan", rounds, data_dir, amp)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    found = ratios(medians)
    seconds_table = table(
        ["one round", "seconds", "measured"],
        [
            [name, f"{seconds:.3f}", str(len(times[name]))]
            for name, seconds in medians.items()
        ],
    )
    ratio_table = table(
        ["ratio", "measured", "target"],
        [[name, f"{ratio:.2f}", target] for name, (ratio, target) in found.items()],
    )
    note = f"ResNet-20, {CLIENTS} clients, E = {STEPS}; medians. {facts()}"
    text = f"{ratio_table}\n\n{note}"
    if parts:
        medians_of_parts = []
        for name, rows in parts.items():
            medians_of_parts.append(
                [
                    name,
                    *(
                        f"{statistics.median(column):.2f}"
                        for column in zip(*rows, strict=True)
                    ),
                ]
            )
        text += "\n\n" + table(
            ["of one reply, seconds, medians", *PARTS], medians_of_parts
        )
    print(f"{seconds_table}\n\n{text}")
    figures = {
        name: {"ratio": ratio, "target": target}
        for name, (ratio, target) in found.items()
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    partial.write_text(
        json.dumps(
            {"machine": facts(), "seconds": times, "ratios": figures, "parts": parts},
            indent=2,
        )
        + "\n"
    )
    os.replace(partial, out)
    if write is not None:
        write_block(write, "fedtan", text)


if __name__ == "__main__":
    typer.run(main)
