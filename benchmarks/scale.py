"""A round of a large federation on Flower's deployment engine: messages, bytes,
seconds, from measured constants.

    python benchmarks/scale.py                          # the table of benchmarks/results.md, from the constants below
    python benchmarks/scale.py --write benchmarks/results.md   # into the page, between the marks "scale"
    python benchmarks/scale.py --measure 8              # measures the constants with 8 light SuperNodes
    python benchmarks/scale.py --check 16 --check 64    # predicts rounds of so many, and runs them
    python benchmarks/scale.py --turns 2                # rounds of three real SuperNodes, arrays one by one and packed

A light SuperNode is a thread: Flower's own connection with its naps, and an answer
without a process for the app. So many fit on one machine, and a round shows what the
SuperLink and the server do. The SuperLink has no TLS here.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import numpy as np
import torch
import typer
from measure import flower_project, write_block
from scale_work import NAP, LightNodes

from apps.flower_processes import (
    Process,
    Scalar,
    flower_environment,
    free_port,
    stream,
    toml_pairs,
)
from apps.local_federation import LocalFederation, make_certificates
from fedbn_flwr.errors import EngineError
from fedbn_flwr.lab.models import build_model
from fedbn_flwr.transport import Barrier, Member
from fedbn_flwr.transport.channel_server import ChannelServer
from fedbn_flwr.transport.grpc_channel import ChannelReducer

RUN = Path(__file__).parents[1] / "docker/run.py"
PORT = 28000  # port of the SuperLink for real SuperNodes
LOOK = 0.5  # seconds between two looks of a SuperNode for its app's reply
POLL = 0.05  # seconds: FLWR_SUPEREXEC_TASK_POLL_INTERVAL of docker-compose.yml
LINE = 125e6  # bytes per second of a line of 1 Gbit/s
CHANNEL_CLIENTS = 512  # largest number of calls that the channel serves at once
# (number of arrays, bytes of each) in the messages from which the constants are found
SHAPES = ((1, 4), (17, 4), (1, 1_000_000))
PIECE = 1_107_000  # bytes of ResNet-20, sent in one piece
CLIENTS = (10, 1000, 10**6)

_APP = "from scale_work import make_server_app\n\nserver_app = make_server_app()\n"
_ROUNDS_APP = """from scale_work import make_client_app, make_rounds_app

client_app = make_client_app()
server_app = make_rounds_app()
"""
_CLIENT = "from flwr.clientapp import ClientApp\n\nclient_app = ClientApp()\n"
_CONFIG = """
nodes = 1
pid = 0
idle = 0.0
rounds = 1
shapes = ""
times = ""
"""

_ROUNDS_CONFIG = """
nodes = 3
pid = 0
rounds = 1
turns = 1
models = ""
times = ""
"""
_MODELS = ("mlp", "resnet20")


@dataclass(frozen=True)
class Constants:
    """Seconds of CPU of one core.

    Attributes:
        poll: the SuperLink, for one look of one SuperNode that finds no message,
            heartbeats included.
        message: the SuperLink and the ServerApp, for a message and its reply.
        array: the same for one array in a message and in its reply.
        byte: the same for a byte in each direction.
        start: a ClientApp's process, with torch and this package imported.
        channel: both ends of one client's call in an exchange by channel.
        watch: SuperLink and ServerApp, for a second in which the server looks for
            replies.
    """

    poll: float
    message: float
    array: float
    byte: float
    start: float
    channel: float
    watch: float


MEASURED = Constants(
    poll=0.00825,
    message=0.162,
    array=0.0722,
    byte=3.12e-8,
    start=3.84,
    channel=0.00098,
    watch=0.0308,
)


@dataclass(frozen=True)
class Load:
    """What a round asks of Flower, for one client.

    Attributes:
        messages: messages to the client; each has a reply.
        arrays: arrays in them, the larger of both directions.
        down: bytes to the client.
        up: bytes from the client.
        calls: exchanges by channel.
    """

    messages: int
    arrays: int
    down: float
    up: float
    calls: int = 0


def loads() -> dict[str, Load]:
    """Return the load of each method for ResNet-20: a message has one array; the last
    one is FedAvg without that.
    """
    parts = build_model("resnet20", num_classes=10, channels=3, size=32).state_dict()
    # Bytes of a later round (tests/strategies/test_fedtan.py counts them); a FedTAN of
    # L = 19 layers has 3L + 1 exchanges, and sends two moments of 1376 channels.
    plain, moments, calls = 4 * 271_098, 4 * 2 * 1376, 3 * 19
    down, up = plain + moments, plain + moments
    found = {name: Load(1, 1, plain, plain) for name in ("FedAvg", "FixBN")}
    found["FedTAN by messages"] = Load(calls + 2, calls + 2, down, up)
    found["FedTAN by channel"] = Load(1, 1, down, up, calls)
    found["FedAvg, arrays one by one"] = replace(found["FedAvg"], arrays=len(parts))
    return found


def waits(load: Load, constants: Constants) -> float:
    """Return the seconds that Flower's own pauses and the starts of processes take in a
    round, without training.

    A SuperNode that has sent its reply looks once, finds nothing and sleeps ``NAP``: by
    then the next message is there. It takes the task, a SuperExec sees that within
    ``POLL``, a process starts, and the SuperNode sees its reply at its next look,
    ``LOOK`` apart.
    """
    return load.messages * (NAP + LOOK * math.ceil((POLL + constants.start) / LOOK))


def service(load: Load, clients: int, constants: Constants) -> float:
    """Return the seconds of one core that SuperLink, ServerApp and channel need for a
    round's clients.
    """
    per_byte = max(load.down, load.up) * constants.byte
    one = (
        load.messages * constants.message
        + load.arrays * constants.array
        + per_byte
        + load.calls * constants.channel
    )
    return clients * one


def line(load: Load, clients: int) -> float:
    """Return the seconds that the round's bytes take on the server's line, the slower
    of both directions.
    """
    return clients * max(load.down, load.up) / LINE


def table(constants: Constants) -> str:
    """Return the Markdown table of ``CLIENTS`` clients, all of which take part in a
    round.
    """
    head = (
        "method",
        "clients a round",
        "messages",
        "bytes",
        "waits, s",
        "server, s",
        "line, s",
        "a round, s",
    )
    lines = [f"| {' | '.join(head)} |", "|---|---:|---:|---:|---:|---:|---:|---:|"]
    for name, load in loads().items():
        for clients in CLIENTS:
            waiting, served, sent = (
                waits(load, constants),
                service(load, clients, constants),
                line(load, clients),
            )
            whole = f"{short(waiting + max(served, sent))}"
            if load.calls and clients > CHANNEL_CLIENTS:
                whole = f"refused: at most {CHANNEL_CLIENTS}"
            cells = [
                name,
                f"{clients:,}",
                f"{clients * load.messages:,}",
                size((load.down + load.up) * clients),
            ]
            lines.append(
                "| "
                + " | ".join(
                    [*cells, short(waiting), short(served), short(sent), whole]
                )
                + " |"
            )
    return "\n".join(lines)


def short(seconds: float) -> str:
    """Return seconds in two digits."""
    return f"{float(f'{seconds:.2g}'):,.10g}"


def size(count: float) -> str:
    """Return bytes with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def known(constants: Constants) -> str:
    """Return the Markdown table of the constants."""
    meanings = {
        f.name: text for f, text in zip(fields(Constants), _meanings(), strict=True)
    }
    lines = ["| constant | ms of one core | for |", "|---|---:|---|"]
    for name, text in meanings.items():
        lines.append(f"| {name} | {1000 * getattr(constants, name):.3g} | {text} |")
    return "\n".join(lines)


def _meanings() -> list[str]:
    text = (Constants.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.split(r"\n +(?=\w+: )", text)
    return [" ".join(entry.split()).partition(": ")[2].rstrip(".") for entry in entries]


def run_light(
    nodes: int, shapes: Sequence[tuple[int, int]], rounds: int, idle: float
) -> dict[str, Any]:
    """Run rounds of so many light SuperNodes; see ``scale_work.make_server_app``.

    Raises:
        EngineError: the run did not complete.
    """
    memory = Path("/dev/shm")  # so that the database waits for no disk
    with tempfile.TemporaryDirectory(
        prefix="scale-benchmark-", dir=memory if memory.is_dir() else None
    ) as name:
        home, port = Path(name), free_port()
        app, times = home / "app", home / "times.json"
        app.mkdir()
        work = Path(__file__).with_name("scale_work.py").read_text()
        files = {
            "scale_work.py": work,
            "benchmark_server.py": _APP,
            "benchmark_client.py": _CLIENT,
        }
        for file, text in {
            **files,
            "pyproject.toml": flower_project(
                "scale-benchmark", "benchmark_server", "benchmark_client", _CONFIG
            ),
        }.items():
            (app / file).write_text(text)
        address = f"127.0.0.1:{port}"
        (home / "config.toml").write_text(
            f'[superlink.light]\naddress = "{address}"\ninsecure = true\n'
        )
        env = flower_environment(home)
        command = [
            "flower-superlink",
            "--insecure",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        link = Process(
            [*command, "--database", str(home / "link.db")], env, home / "superlink.log"
        )
        try:
            link.wait_healthy(f"http://{address}/health")
            light = LightNodes(address, nodes)
            try:
                texts = " ".join(f"{count}x{size}" for count, size in shapes)
                config: dict[str, Scalar] = {
                    "nodes": nodes,
                    "pid": link.pid,
                    "idle": idle,
                    "rounds": rounds,
                }
                pairs = toml_pairs({**config, "shapes": texts, "times": str(times)})
                command = [
                    sys.executable,
                    str(RUN),
                    str(app),
                    "light",
                    "--stream",
                    "--run-config",
                    pairs,
                ]
                log = stream(command, env, _show)
                if not log[-1].endswith(": finished:completed"):
                    raise EngineError("\n".join(log))
                return dict(json.loads(times.read_text()))
            finally:
                light.close()
        finally:
            link.end()


def _show(text: str) -> None:
    if text.startswith("{"):  # the figures of a round
        print(text, file=sys.stderr, flush=True)


def seconds_of(
    found: Mapping[str, Any], shape: tuple[int, int], keys: Sequence[str]
) -> float:
    """Return the median over the rounds of a shape of the sum of these figures."""
    rounds = [r for r in found["rounds"] if tuple(r["shape"]) == shape]
    return float(statistics.median(sum(r[key] for key in keys) for r in rounds))


def run_rounds(nodes: int, turns: int, rounds: int) -> list[dict[str, Any]]:
    """Run rounds of FedAvg over so many real SuperNodes, with TLS and keys; see
    ``scale_work.make_rounds_app``.

    Raises:
        EngineError: the run did not complete.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="scale-benchmark-", dir=memory if memory.is_dir() else None
    ) as name:
        app, times = Path(name) / "app", Path(name) / "times.json"
        app.mkdir()
        (app / "scale_work.py").write_text(
            Path(__file__).with_name("scale_work.py").read_text()
        )
        (app / "benchmark_app.py").write_text(_ROUNDS_APP)
        project = flower_project(
            "scale-benchmark", "benchmark_app", "benchmark_app", _ROUNDS_CONFIG
        )
        (app / "pyproject.toml").write_text(project)
        make_certificates(Path(name) / "certs", nodes)
        with closing(
            LocalFederation(Path(name) / "net", Path(name) / "certs", nodes, PORT, ())
        ) as found:
            found.start()
            config: dict[str, Scalar] = {
                "nodes": nodes,
                "pid": found.processes["superlink"].pid,
                "models": " ".join(_MODELS),
            }
            found.run(
                {**config, "rounds": rounds + 1, "turns": turns, "times": str(times)},
                app,
            )
            return list(json.loads(times.read_text()))


def table_of_rounds(found: Sequence[Mapping[str, Any]], nodes: int) -> str:
    """Return the Markdown table of the medians of ``run_rounds``, and their ratios."""
    lines = [
        "| model | arrays | s a round | CPU s of the server for a client |",
        "|---|---|---:|---:|",
    ]
    middle: dict[tuple[str, bool], float] = {}
    for model in _MODELS:
        for packs in (False, True):
            rounds = [r for r in found if (r["model"], r["packs"]) == (model, packs)]
            seconds = middle[model, packs] = statistics.median(
                r["seconds"] for r in rounds
            )
            cpu = statistics.median(
                (r["superlink"] + r["serverapp"]) / nodes for r in rounds
            )
            lines.append(
                f"| {model} | {'in one piece' if packs else 'one by one'} |"
                f" {seconds:.1f} | {cpu:.2f} |"
            )
        if len({r["sha256"] for r in found if r["model"] == model}) != 1:
            raise EngineError(f"{model}: the bits of the runs differ")
    big, small = _MODELS[1], _MODELS[0]
    one_by_one, in_one = (
        middle[big, packs] / middle[small, packs] for packs in (False, True)
    )
    lines.append(
        f"\nA round of {big} takes {in_one:.2f} of one of {small} in one piece,"
        f" {one_by_one:.2f} one by one."
    )
    return "\n".join(lines)


def measure(nodes: int) -> Constants:
    """Measure the constants with light SuperNodes, a ClientApp's imports and a channel
    on this machine.
    """
    alone = run_light(0, (), 0, 10.0)["idle"]  # costs of the run's log and heartbeat
    found = run_light(nodes, SHAPES, 2, 10.0)
    idle = found["idle"]["cpu"] / found["idle"]["seconds"]
    poll = (idle - alone["cpu"] / alone["seconds"]) * NAP / nodes

    rounds = found["rounds"]
    spent = [r["superlink"] + r["serverapp"] - idle * r["seconds"] for r in rounds]
    shapes = []
    for r in rounds:
        arrays, size = r["shape"]
        shapes.append((nodes, nodes * arrays, nodes * arrays * size, r["seconds"]))
    scale = np.array([1, 1, 1e6, 1])
    message, array, byte, watch = (
        np.linalg.lstsq(np.array(shapes) / scale, np.array(spent), rcond=None)[0]
        / scale
    )
    channel = channel_seconds()
    return Constants(
        poll,
        float(message),
        float(array),
        float(byte),
        start_seconds(),
        channel,
        float(watch),
    )


def start_seconds() -> float:
    """Return the CPU seconds of a process that imports what a ClientApp of this package
    does, the least of three.
    """
    code = "import flwr.supernode.cli.flwr_clientapp, torch, fedbn_flwr.app"
    found = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        )
    return min(found)


def channel_seconds(clients: int = 16, exchanges: int = 50) -> float:
    """Return the CPU seconds of a client's call in an exchange by channel, both ends
    together.
    """
    server = ChannelServer("127.0.0.1:0")
    barrier = Barrier(
        {i: Member(1.0, 1, f"client {i}") for i in range(clients)}, timeout=60
    )
    tokens = server.admit(barrier)

    def work(client: int) -> None:
        reducer = ChannelReducer(server.address, tokens[client], b"", 60)
        reducer.begin()
        for k in range(exchanges):
            reducer.reduce(f"mean/{k}", torch.zeros(64))
        reducer.close()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(clients)]
    began = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.process_time() - began
    server.close()
    return spent / clients / exchanges


def core_share(seconds: float = 2.0) -> float:
    """Return the part of a core that a busy process gets beside what else this machine
    does.
    """
    began, used = time.monotonic(), time.process_time()
    while time.monotonic() - began < seconds:
        pass
    return (time.process_time() - used) / (time.monotonic() - began)


def check(nodes: int, constants: Constants) -> str:
    """Return the rows of the table of predicted and measured rounds of so many light
    SuperNodes.
    """
    shapes = ((1, 4), (1, PIECE), (8, 4096))
    share = core_share()
    found = run_light(nodes, shapes, 2, 10.0)
    share = (share + core_share()) / 2
    rows = []
    for count, number in shapes:
        load = Load(1, count, count * number, count * number)
        served, looks = (
            service(load, nodes, constants),
            constants.watch + nodes * constants.poll / NAP,
        )
        # A node sleeps for a nap between two looks. On average, the last of n nodes
        # wakes after n / (n + 1) of a nap.
        wall = (NAP * nodes / (nodes + 1) + served / share) / (1 - looks)
        cpu = served + wall * looks
        seconds = seconds_of(found, (count, number), ("seconds",))
        spent = seconds_of(found, (count, number), ("superlink", "serverapp"))
        one = (spent - seconds * looks) / nodes
        cells = [
            nodes,
            f"{count} array(s) of {number:,} bytes",
            *(f"{x:.1f}" for x in (cpu, spent)),
        ]
        cells += [f"{one:.2f}", *(f"{x:.1f}" for x in (wall, seconds)), f"{share:.2f}"]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def main(
    measure_with: Annotated[
        int,
        typer.Option(
            "--measure", min=0, help="number of nodes for measuring the constants"
        ),
    ] = 0,
    check_with: Annotated[
        list[int] | None,
        typer.Option(
            "--check", min=1, help="number of nodes for a predicted and real round"
        ),
    ] = None,
    turns: Annotated[
        int,
        typer.Option(
            min=0, help="turns of rounds over three real SuperNodes; minutes each"
        ),
    ] = 0,
    write: Annotated[
        Path | None,
        typer.Option(help="a page with the marks <!-- scale --> and <!-- /scale -->"),
    ] = None,
) -> None:
    """Predict rounds of large federations; on request measure the constants and check
    the prediction.
    """
    constants = measure(measure_with) if measure_with else MEASURED
    machine = (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load"
        f" {os.getloadavg()[0]:.1f}"
    )
    if measure_with:
        print(f"{machine}: {constants}")
    idle = ", ".join(f"{n:,}: {short(n * constants.poll / NAP)}" for n in CLIENTS)
    text = "\n\n".join(
        [
            known(constants),
            table(constants),
            f"Cores of the SuperLink without any message, by nodes: {idle}.",
        ]
    )
    print(text)
    if write:
        write_block(write, "scale", text)
    if check_with:
        head = [
            "nodes",
            "a message",
            "CPU s, predicted",
            "measured",
            "of it for a client, without looks",
        ]
        head += ["s a round, predicted", "measured", "core share"]
        print(f"\n| {' | '.join(head)} |\n|---:|---|---:|---:|---:|---:|---:|---:|")
        for nodes in check_with:
            print(check(nodes, constants), flush=True)
    if turns:
        print(f"\n{table_of_rounds(run_rounds(3, turns, 2), 3)}")


if __name__ == "__main__":
    typer.run(main)
