"""The peak memory of each process of a federation over a network, by the size of the model.

    python benchmarks/network_memory.py --write docs/deployment.md    # minutes

One run for each size: FedAvg, two nodes, two rounds, a model of Linear layers and BatchNorm on the embedded digits,
over TLS on 127.0.0.1. A peak is the largest resident set (VmHWM) of any process of a service, which does not depend
on the speed of the machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from measure import ROOT, table, write_block
from torch import nn

from apps.flower_processes import free_port
from apps.local_federation import LocalFederation, make_certificates

SIZES = (20, 100, 200)  # MB
NODES = 2
SERVICES = {
    "superlink": "SuperLink",
    "supernode-1": "SuperNode",
    "superexec-serverapp": "ServerApp",
    "superexec-clientapp-1": "ClientApp",
}


def model_of(megabytes: int) -> nn.Module:
    """Return a network of this size, with four equal Linear layers of the digits' classes."""
    width = round((megabytes * 1e6 / 4 / 4) ** 0.5)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, width)]
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


for _size in SIZES:
    globals()[f"mb{_size}"] = partial(model_of, _size)


def peak(group: int) -> int:
    """Return the largest peak, in MB, of the processes of a group."""
    peaks = [0]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(process.name)) == group:
                status = (process / "status").read_text()
                _, _, rest = status.partition("VmHWM:")
                if rest:
                    peaks.append(int(rest.split()[0]) * 1024 // 10**6)
    return max(peaks)


def measured(size: int, folder: Path) -> dict[str, int]:
    """Do a run with a model of a size in MB, and return the peak of each service."""
    make_certificates(folder / "certs", NODES)
    configs = [
        f"partition-id={n} num-partitions={NODES} allow-modules='network_memory'"
        for n in range(NODES)
    ]
    found = LocalFederation(
        folder / "net", folder / "certs", NODES, free_port(), configs
    )
    here = Path(__file__).parent
    found.environment["PYTHONPATH"] = f"{ROOT}:{here}"
    peaks = dict.fromkeys(SERVICES, 0)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            for name in SERVICES:
                if name in found.processes:
                    peaks[name] = max(peaks[name], peak(found.processes[name].pid))

    with closing(found):
        found.start()
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            found.run(
                {
                    "strategy": "fedavg",
                    "model": f"network_memory:mb{size}",
                    "num-clients": NODES,
                    "num-server-rounds": 2,
                    "local-steps": 1,
                    "batch-size": 8,
                    "eval-on": "personal-own",
                    "out": str(folder / "out"),
                }
            )
        finally:
            over.set()
            watcher.join()
    return peaks


def main(
    write: Annotated[Path | None, typer.Option(help="page for the table")] = None,
    size: Annotated[list[int], typer.Option(help="sizes in MB")] = [*SIZES],  # noqa: B006
) -> None:
    """Measure all sizes, and print or write the table."""
    rows = []
    for megabytes in size:
        with tempfile.TemporaryDirectory(prefix="fedbn-memory-") as folder:
            began = time.monotonic()
            peaks = measured(megabytes, Path(folder))
            print(
                megabytes, peaks, f"{time.monotonic() - began:.0f} s", file=sys.stderr
            )
        rows.append([f"{megabytes} MB", *(f"{peaks[name]:,} MB" for name in SERVICES)])
    text = table(["model", *SERVICES.values()], rows)
    if write:
        write_block(write, "network-memory", text)
    else:
        print(text)


if __name__ == "__main__":
    typer.run(main)
