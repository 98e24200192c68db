"""An operator meets a locked database, a second start and a wrong clock."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from apps.flower_processes import free_port
from apps.local_federation import LocalFederation
from tests.lab.deployment.test_faults import Run
from tests.support.checkout import ROOT
from tests.support.network import NETWORK

pytestmark = NETWORK

NODES = 2


def ids(federation: LocalFederation) -> set[str]:
    """Return the ids of the online nodes."""
    command = ["flwr", "supernode", "list", "federation", "--format", "json"]
    done = subprocess.run(command, env=federation.environment, capture_output=True)
    nodes = json.loads(done.stdout)["nodes"]
    return {node["node-id"] for node in nodes if node["status"] == "online"}


def test_a_database_that_is_locked_for_a_while_costs_nothing(
    federation, in_process, tmp_path
) -> None:
    """A large model locks it. The SuperLink answers with 500, and nodes try again."""
    nodes = [federation.processes[f"supernode-{n + 1}"] for n in range(NODES)]
    how = {"strategy": "fedbn", "num-clients": NODES, "num-server-rounds": 3}
    run = Run(federation, tmp_path / "out", how)
    run.wait_for_round(1)
    database = sqlite3.connect(federation.folder / "superlink.db", timeout=30)
    database.execute("BEGIN IMMEDIATE")
    time.sleep(15)  # SQLite waits 5 s
    database.rollback()
    database.close()
    ours, theirs = run.end(), in_process(**how)
    assert (ours["sha256"], ours["rejected"]) == (theirs["sha256"], 0)
    assert [node.code for node in nodes] == [None] * NODES


@pytest.mark.parametrize("clock", ["the machine's", "Flower's"])
def test_a_node_whose_clock_is_ahead_ends_with_an_error(
    federation, tmp_path, clock: str
) -> None:
    """The start of the node finds the first, and the SuperLink refuses the second."""
    changed = {
        "the machine's": "import time; now = time.time; time.time = lambda: now() + 8",
        "Flower's": "import datetime; from flwr.supercore import date; now = date.now;"
        " date.now = lambda: now() + datetime.timedelta(seconds=8)",
    }
    (tmp_path / "sitecustomize.py").write_text(changed[clock])
    path = f"{tmp_path}:{federation.environment['PYTHONPATH']}"
    done = subprocess.run(
        [*federation.commands["supernode-1"], f"--port={free_port()}"],
        env={**federation.environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    assert ("Starting Flower SuperNode" in done.stderr) == (clock == "Flower's")


def test_a_second_start_in_the_folder_ends_and_disturbs_nothing(federation) -> None:
    before = ids(federation)
    words = ["--folder", federation.folder, "--certs", federation.certs]
    done = subprocess.run(
        [sys.executable, ROOT / "apps/local_federation.py", *words],
        env=federation.environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "--folder" in done.stderr
    assert ids(federation) == before


@pytest.mark.parametrize("end", ["close", "kill"])
def test_nodes_keep_their_ids_when_the_federation_starts_again(
    federation, end: str
) -> None:
    """After a kill, the SuperLink counts the nodes as online for a while."""
    before = ids(federation)
    if end == "kill":
        for process in federation.processes.values():
            process.signal(signal.SIGKILL)
    federation.close()
    federation.start()
    assert ids(federation) == before
    assert len(before) == NODES
