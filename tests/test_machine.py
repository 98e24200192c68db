"""Cores and memory are the machine's, or the limits of its control groups.

Freed memory is kept.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess

import pytest

from fedbn_flwr import machine
from fedbn_flwr.machine import begin_fork, forking, num_cores


@pytest.mark.parametrize(
    ("outer", "inner", "cores"),
    [
        ("max 100000", "max", 64),
        ("350000 100000", "max 100000", 3),
        ("max", "50000 100000", 1),
    ],
)
def test_the_smallest_limit_of_the_groups_counts(
    outer: str, inner: str, cores: int, tmp_path, monkeypatch
) -> None:
    group = tmp_path / "fs/slurm/job"
    group.mkdir(parents=True)
    (tmp_path / "own").write_text("1:name=systemd:/x\n0::/slurm/job\n")
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "fs")
    monkeypatch.setattr(machine, "_OWN", tmp_path / "own")
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: set(range(64)), raising=False
    )
    assert num_cores() == 64, "no limit is written anywhere"
    (group.parent / "cpu.max").write_text(f"{outer}\n")
    (group / "cpu.max").write_text(f"{inner}\n")
    assert num_cores() == cores
    (tmp_path / "own").unlink()
    assert num_cores() == 64, "control groups do not exist"


_FAULTS = """
import json, os, resource, threading
import torch
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
import fedbn_flwr.__main__
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.lab import cli
from fedbn_flwr.lab.runs import node

def train():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3)
    )
    images = torch.randn(64, 3, 32, 32)
    for step in range(8):
        if step == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model(images).sum().backward()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

faults = []
torch.set_num_threads(1)
app = ClientApp()

@app.train()
def client(message, context):
    train()
    metrics = MetricRecord({"faults": faults.pop()})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)

def command():
    cli.app = train
    fedbn_flwr.__main__.main()

def of_node():
    node.on_network_node = lambda: True
    node._run_clients(())
    train()

def worker():
    with InProcessGrid(app, 2, workers=2) as grid:
        nodes = grid.get_node_ids()
        sent = [Message(RecordDict(), each, "train") for each in nodes]
        for reply in grid.send_and_receive(sent):
            faults.append(reply.content["metrics"]["faults"])

def do(what):
    # Threads have their own pools of memory.
    thread = threading.Thread(target=what)
    thread.start(), thread.join()

calls = {each.__name__: each for each in (train, command, of_node, worker)}
names = ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"]
for name in (*calls, *names):
    if os.fork() == 0:
        if name in names:
            os.environ[name] = ""
        do(calls.get(name, command))
        print(json.dumps([name, max(faults)]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_our_processes_keep_freed_memory_unless_the_environment_sets_it(
    at_once,
) -> None:
    plain = {
        name: value
        for name, value in at_once.items()
        if not name.startswith(("MALLOC_", "GLIBC_"))
    }
    done = subprocess.run(
        ["python", "-c", _FAULTS],
        env=plain,
        capture_output=True,
        text=True,
        check=True,
    )
    faults = dict(json.loads(line) for line in done.stdout.splitlines())
    # The import alone changes nothing, because the process may be a user's.
    few = {name for name, count in faults.items() if 4 * count < faults["train"]}
    assert few == {"command", "of_node", "worker"}, faults
    assert len(faults) == 7


def test_a_fork_reads_at_its_own_positions_and_writes_at_common_ones(tmp_path) -> None:
    (tmp_path / "table").write_bytes(bytes(range(9)))
    closed = (tmp_path / "table").open("rb")
    modes = {"table": "rb", "log": "wb", "notes": "a+b"}
    table, log, notes = (
        (tmp_path / name).open(mode, 0) for name, mode in modes.items()
    )
    table.seek(4)
    waits, goes = os.pipe()
    with forking():
        fork = os.fork()
        if not fork:
            os.read(waits, 1)
            closed.close()
            begin_fork()
            log.write(table.read(2))
            notes.write(b"fork")
            os._exit(0)
    table.seek(7)
    log.write(b"first")
    notes.write(b"first")
    os.write(goes, b".")
    os.waitpid(fork, 0)
    assert (table.tell(), log.tell()) == (7, 7)
    assert (tmp_path / "log").read_bytes() == b"first" + bytes([4, 5])
    assert (tmp_path / "notes").read_bytes() == b"firstfork"
