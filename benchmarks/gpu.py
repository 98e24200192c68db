"""What makes training faster on a GPU: ResNet-20 alone, several clients on one device, and FedTAN's reductions.

    python benchmarks/gpu.py                              # under eight minutes
    python benchmarks/gpu.py --write docs/performance.md  # the tables into the page, between <!-- gpu --> marks
    python benchmarks/gpu.py --device cpu --steps 3       # tries everything but CUDA graphs and streams

Random images of CIFAR-10's shape that lie on the device; SGD without momentum. All that is compared takes turns, and
medians of steps per second over all clients are shown, as ratios to the plain eager loop of the same run. Before it is
timed, each way trains for a few steps from one start, and its parameters, statistics and counters are held against
those of the eager loop: ||difference|| / ||the eager loop's change|| must stay below the tolerance. That is done in
float64, where rounding hides nothing; what trains in bfloat16 is held against the eager loop in float32. A way that
fails says so in its row, and the others go on.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import torch
import typer
from gpu_ways import (
    Limits,
    Make,
    Setting,
    Way,
    at_barrier,
    compiled,
    eager,
    federated_rate,
    graphed,
    mps,
    start,
    streamed,
    synchronise,
    threaded,
    vmapped,
    vmapped_graph,
)
from measure import commit, write_block
from torch import Tensor

BATCHES = (20, 128)
CHECKED_STEPS = 5
TOLERANCES = {"float64": 1e-6, "bfloat16": 0.5}
EAGER = "eager, contiguous"
NEEDS_GPU = "needs a GPU: not run"


def check(make: Make, setting: Setting, kind: str) -> float:
    """Return the largest distance of a client from the eager loop after a few steps; counters must be equal.

    Raises:
        RuntimeError: it is above the tolerance of the kind.
    """
    if kind == "float64":
        setting = replace(setting, dtype=torch.float64)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found, expected = make(setting), eager(setting)
        for step in range(CHECKED_STEPS):
            found.step(setting.batches(step))
            expected.step(setting.batches(step))
        synchronise(setting.device)
    worst = max(_distance(a, b) for a, b in zip(found.states(), expected.states(), strict=True))
    if not worst <= TOLERANCES[kind]:
        raise RuntimeError(f"{worst:.1e} from the eager loop after {CHECKED_STEPS} steps, above {TOLERANCES[kind]:g}")
    return worst


def _distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the larger of two distances: of the parameters, and of the running statistics."""
    off, moved = [0.0, 0.0], [0.0, 0.0]
    for name, before in start().state_dict().items():
        a, b = found[name].detach().cpu().double(), expected[name].detach().cpu().double()
        if not before.is_floating_point():
            if not torch.equal(a, b):
                raise RuntimeError(f"{name} is {a.tolist()}, in the eager loop {b.tolist()}")
            continue
        kind = int("running_" in name)
        off[kind] += float((a - b).square().sum())
        moved[kind] += float((b - before.double()).square().sum())
    return max(math.sqrt(distance / whole) for distance, whole in zip(off, moved, strict=True))


@dataclass
class Row:
    """A row of a table: the rates of each batch size, and the distance from the eager loop or what went wrong."""

    rates: dict[int, float] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)


def rate(way: Way, setting: Setting, limits: Limits) -> float:
    """Return the steps per second of all clients together."""
    synchronise(setting.device)
    count, began = 0, time.perf_counter()
    while count < (limits.steps or 5) or (not limits.steps and time.perf_counter() - began < limits.seconds):
        way.step(setting.batches(count))
        count += 1
        if not limits.steps and count % 10 == 0:
            synchronise(setting.device)  # else the host runs ahead, and the clock stops too late
    synchronise(setting.device)
    return count * setting.clients / (time.perf_counter() - began)


def compare(
    ways: Mapping[str, tuple[Make, str] | None], device: torch.device, clients: int, limits: Limits
) -> dict[str, Row]:
    """Check and measure ways of training; None stands for one that needs a GPU."""
    rows = {name: Row() for name in ways}
    for size in BATCHES:
        setting, ready = Setting(device, size, clients), dict[str, Way]()
        for name, entry in ways.items():
            if entry is None:
                rows[name].notes[size] = NEEDS_GPU
                continue
            make, kind = entry
            try:
                distance = check(make, setting, kind)
                ready[name] = make(setting)
                rate(ready[name], setting, Limits(4, 0, 1))  # warms up, compiles and records
                rows[name].notes[size] = f"{distance:.0e} ({kind})"
            except Exception as error:  # the others go on; the row says it
                rows[name].notes[size] = failure(error)
            print(f"batch {size}, {clients} client(s): {name}: {rows[name].notes[size]}", file=sys.stderr, flush=True)
        rates: dict[str, list[float]] = {name: [] for name in ready}
        for turn in range(limits.repeats):
            for name in list(ready)[:: 1 if turn % 2 == 0 else -1]:
                rates[name].append(rate(ready[name], setting, limits))
        for name, found in rates.items():
            rows[name].rates[size] = statistics.median(found)
    return rows


def failure(error: Exception) -> str:
    """Return what went wrong in a few words; all of it goes to the log."""
    traceback.print_exception(error, file=sys.stderr)
    return f"failed: {type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}".replace("|", "/")


def alone(device: torch.device, limits: Limits, compile_too: bool) -> dict[str, Row]:
    """Compare ways of training one model."""
    last, gpu = torch.channels_last, device.type == "cuda"
    fast = partial(graphed, memory_format=last, amp=True)
    ways: dict[str, tuple[Make, str] | None] = {
        EAGER: (eager, "float64"),
        "channels_last": (partial(eager, memory_format=last), "float64"),
        "bf16": (partial(eager, amp=True), "bfloat16"),
        "bf16, channels_last": (partial(eager, memory_format=last, amp=True), "bfloat16"),
        "CUDA graph": (graphed, "float64") if gpu else None,
        "CUDA graph, channels_last": (partial(graphed, memory_format=last), "float64") if gpu else None,
        "CUDA graph, bf16, channels_last": (fast, "bfloat16") if gpu else None,
    }
    if compile_too:
        ways["torch.compile"] = compiled, "float64"
        ways["torch.compile, bf16, channels_last"] = partial(compiled, memory_format=last, amp=True), "bfloat16"
    return compare(ways, device, 1, limits)


def together(device: torch.device, clients: int, limits: Limits) -> dict[str, Row]:
    """Compare ways of training several clients in one process."""
    gpu = device.type == "cuda"
    ways: dict[str, tuple[Make, str] | None] = {
        "one after the other, eager": (eager, "float64"),
        "one after the other, CUDA graphs": (graphed, "float64") if gpu else None,
        "a thread and a stream each, eager": (threaded, "float64") if gpu else None,
        "one thread, a stream each, CUDA graphs": (streamed, "float64") if gpu else None,
        "torch.func.vmap over stacked models": (vmapped, "float64"),
        "torch.func.vmap in one CUDA graph": (vmapped_graph, "float64") if gpu else None,
    }
    return compare(ways, device, clients, limits)


def in_workers(device: torch.device, clients: int, limits: Limits) -> dict[str, Row]:
    """Return the rates of rounds of this package's FedAvg, with the clients in worker processes (0: in this one).

    On a GPU also with worker processes that share it by CUDA's Multi-Process Service, where that is installed.
    """
    rows: dict[str, Row] = {}
    ways = [(0, False), (2, False), (4, False), *([(2, True), (4, True)] if device.type == "cuda" else [])]
    for workers, shared in ways:
        name = f"workers={workers}{', MPS' * shared}"
        row = rows[f"fedbn-flwr, a round of FedAvg, {name}"] = Row()
        for size in BATCHES:
            try:
                with mps() if shared else nullcontext():
                    row.rates[size] = federated_rate(Setting(device, size, clients), workers, limits)
                row.notes[size] = "tests hold its bits"
            except Exception as error:
                row.notes[size] = failure(error)
            print(f"batch {size}, {name}: {row.notes[size]}", file=sys.stderr, flush=True)
    return rows


def reductions(device: torch.device, clients: int, limits: Limits) -> dict[str, Row]:
    """Compare a synchronised step of all clients, its tensors reduced on the device or through the host."""
    ways: dict[str, tuple[Make, str] | None] = {
        "plain steps, a thread each": (partial(at_barrier, how=None), ""),
        "FedTAN's step, reduced on the device": (partial(at_barrier, how="device"), ""),
        "FedTAN's step, reduced on the host": (partial(at_barrier, how="host"), ""),
    }
    rows = {name: Row() for name in ways}
    for size in BATCHES:
        setting = Setting(device, size, clients)
        try:
            ready = {name: entry[0](setting) for name, entry in ways.items() if entry}
            for step in range(2):
                for way in ready.values():
                    way.step(setting.batches(step))
            on_device, on_host = (list(ready.values())[i].states() for i in (1, 2))
            worst = max(_distance(a, b) for a, b in zip(on_device, on_host, strict=True))
            if not worst <= 1e-2:
                raise RuntimeError(f"reductions on the device and on the host end {worst:.1e} apart")
            rates: dict[str, list[float]] = {name: [] for name in ready}
            for _ in range(limits.repeats):
                for name, way in ready.items():
                    rates[name].append(rate(way, setting, limits))
        except Exception as error:
            for row in rows.values():
                row.notes[size] = failure(error)
            continue
        for name, found in rates.items():
            rows[name].rates[size] = statistics.median(found)
            rows[name].notes[size] = "" if name.startswith("plain") else f"{worst:.0e} between them"
    return rows


def table(title: str, rows: Mapping[str, Row]) -> str:
    """Return a Markdown table of the rates of each batch size over those of the first row."""
    base = next(iter(rows.values())).rates
    head = " | ".join(f"batch {size} | steps/s | off" for size in BATCHES)
    lines = [f"| {title} | {head} |", "|---|" + "---:|---:|---|" * len(BATCHES)]
    for name, row in rows.items():
        cells = []
        for size in BATCHES:
            known = size in row.rates and size in base
            ratio = f"{row.rates[size] / base[size]:.2f}" if known else "-"
            cells += [ratio, f"{row.rates[size]:.1f}" if size in row.rates else "-", row.notes.get(size, "")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def facts(device: torch.device) -> str:
    """Return the device, the versions and the commit."""
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    threads = f", {torch.get_num_threads()} torch thread(s)" if device.type == "cpu" else ""
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    return f"{what}{threads}, {os.cpu_count()} CPU cores, {versions}, commit {commit() or 'unknown'}"


def main(
    device: Annotated[str, typer.Option(help="cuda, cuda:N, or cpu to try the program")] = "cuda",
    steps: Annotated[int, typer.Option(min=0, help="steps in each measurement; 0 = for --seconds")] = 0,
    seconds: Annotated[float, typer.Option(min=0.05, help="seconds of each measurement")] = 0.7,
    repeats: Annotated[int, typer.Option(min=1, help="measurements of each way, in turns")] = 5,
    clients: Annotated[int, typer.Option(min=1, help="clients that train together")] = 8,
    compile_too: Annotated[
        bool, typer.Option("--compile/--no-compile", help="torch.compile, which takes minutes")
    ] = True,
    write: Annotated[Path | None, typer.Option(help="a page with the marks <!-- gpu --> and <!-- /gpu -->")] = None,
) -> None:
    """Measure what makes training faster on a GPU."""
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(
            "there is no CUDA device here; --device cpu --steps 3 tries the program", param_hint="--device"
        )
    if where.type == "cuda":
        torch.cuda.set_device(where)
    began, limits = time.perf_counter(), Limits(steps, seconds, 1 if steps else repeats)
    titled = {
        "one model": alone(where, limits, compile_too),
        f"{clients} clients, steps of all": together(where, clients, limits),
        f"{clients} clients, steps of all in rounds": in_workers(where, clients, limits),
        "5 clients, steps of all": reductions(where, 5, limits),
    }
    tolerances = ", ".join(f"{value:g} ({kind})" for kind, value in TOLERANCES.items())
    about = (
        f"{facts(where)}; {time.perf_counter() - began:.0f} s in all. ResNet-20, images of 32 pixels. A ratio is steps "
        "per second over those of the first row. Off: the distance from the eager loop after "
        f"{CHECKED_STEPS} steps, over the distance travelled; above {tolerances} the way fails. Counters are equal."
    )
    text = "\n\n".join([about, *(table(title, rows) for title, rows in titled.items())])
    print(text)
    if write:
        write_block(write, "gpu", text)


if __name__ == "__main__":
    typer.run(main)
