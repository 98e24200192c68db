"""A run continues after faults and after actions of an operator.

Each test has one fault. ``make network`` runs them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from apps.flower_processes import nodes_online, running
from apps.local_federation import LocalFederation
from fedbn_flwr.checked_file import read_checked
from fedbn_flwr.errors import EngineError
from tests.support.checkout import ROOT
from tests.support.network import NETWORK, settings_for
from tests.support.options import kebab
from tests.support.runs import QUICK, lines_of, summary_of

pytestmark = NETWORK

NODES = 3
ROUNDS = 4


class Run:
    """A run in a thread."""

    def __init__(self, federation: LocalFederation, out: Path, settings: dict) -> None:
        self.out = out
        self._error = ""
        given = {**QUICK, "num-server-rounds": ROUNDS, **settings}
        self.num_rounds = given["num-server-rounds"]

        def work() -> None:
            try:
                federation.run(settings_for(federation, {**given, "out": str(out)}))
            except EngineError as error:
                self._error = str(error)

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def wait_for_round(self, server_round: int) -> None:
        """Return when the round is over."""
        deadline = time.monotonic() + 600
        while len(self.lines()) < server_round and self._thread.is_alive():
            assert time.monotonic() < deadline, f"round {server_round} does not come"
            time.sleep(0.05)
        assert len(self.lines()) >= server_round, self.error()

    def under_way(self) -> bool:
        return self._thread.is_alive()

    def lines(self) -> list[dict]:
        return lines_of(self.out)

    def error(self) -> str:
        """Wait for the end of the run, and return the end of the log.

        The result is "" if the run completed.
        """
        self._thread.join()
        return self._error

    def end(self) -> dict:
        """Wait for the end of the run without error, and return the summary."""
        assert self.error() == ""
        assert len(self.lines()) == self.num_rounds
        return summary_of(self.out)


@pytest.fixture
def begin(federation, tmp_path) -> Iterator[Callable]:
    runs = []

    def do(**settings) -> Run:
        runs.append(Run(federation, tmp_path / "out", kebab(settings)))
        return runs[-1]

    yield do
    for run in runs:
        run._thread.join()


def bring_back(federation: LocalFederation) -> None:
    """Restart the killed services until all nodes are online, for later tests."""
    deadline = time.monotonic() + 300
    while (
        federation.restart_dead()
        or nodes_online(federation.environment, "federation") < NODES
    ):
        assert time.monotonic() < deadline, "the nodes do not come back"
        time.sleep(2)


def children(*parents: int) -> set[int]:
    """Return the processes that these processes have started."""
    found = (Path(f"/proc/{parent}/task/{parent}/children") for parent in parents)
    return {
        int(pid) for path in found if path.exists() for pid in path.read_text().split()
    }


def apps_of(federation: LocalFederation, superexec: str) -> set[int]:
    """Return the process ids of the ClientApps that a node's SuperExec runs."""
    return children(*children(federation.processes[superexec].pid))


def next_client_of(federation: LocalFederation, number: int) -> int:
    """Return the process id of the next ClientApp of a node's SuperExec.

    The ClientApp must have used 0.3 s of CPU time. If it were killed earlier, it might
    not have taken its message yet, and Flower would silently start it again.
    """

    def apps() -> set[int]:
        return apps_of(federation, f"superexec-clientapp-{number}")

    before, deadline = apps(), time.monotonic() + 300
    while not (
        new := [
            app for app in apps() - before if running(app) and cpu_seconds(app) > 0.3
        ]
    ):
        assert time.monotonic() < deadline, f"node {number} starts no ClientApp"
        time.sleep(0.02)
    return new[0]


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used, or 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_superlink_that_is_killed_and_restarted_within_ten_seconds(
    federation, begin, in_process
) -> None:
    """Nothing is lost, and a run without the fault has the same bits."""
    how = {"strategy": "fixbn", "freeze_at": 2}
    run = begin(**how)
    run.wait_for_round(1)
    federation.processes["superlink"].kill()
    time.sleep(4)
    while not federation.restart_dead():
        time.sleep(0.1)
    ours, theirs = run.end(), in_process(**how, num_server_rounds=ROUNDS)
    assert (ours["sha256"], ours["rejected"]) == (theirs["sha256"], 0)


@pytest.mark.parametrize("exchange", ["channel", "messages"])
def test_a_node_that_is_killed_during_a_round_and_does_not_return(
    exchange: str, federation, begin
) -> None:
    """Under FedTAN, the other clients repeat the step without it."""
    run = begin(strategy="fedtan", fedtan_transport=exchange)
    run.wait_for_round(1)
    next_client_of(federation, 3)
    for name in ("superexec-clientapp-3", "supernode-3"):
        federation.processes[name].kill()
    try:
        run.end()
    finally:
        bring_back(federation)
    assert run.lines()[0]["participants"] == [0, 1, 2]
    assert [line["participants"] for line in run.lines()[1:]] == [[0, 1]] * (ROUNDS - 1)
    assert "(partition 2): " in run.lines()[1]["rejected"][0]


def test_a_node_that_is_killed_and_restarted_still_has_its_part(
    federation, begin
) -> None:
    """The new SuperNode process has no memory.

    The counters show that its BN layers come from the folder.
    """
    # The timeout is reached if the server never sees that the node was away.
    run = begin(strategy="fedbn", num_server_rounds=6, round_timeout=120.0)
    run.wait_for_round(1)
    next_client_of(federation, 3)
    for name in ("superexec-clientapp-3", "supernode-3"):
        federation.processes[name].kill()
    # Act as the restart policy. Flower refuses the node's key for a while.
    while run.under_way():
        federation.restart_dead()
        time.sleep(1)
    run.end()
    took_part = [line["round"] for line in run.lines() if 2 in line["participants"]]
    assert took_part[0] == 1
    assert took_part[-1] == 6
    assert len(took_part) < 6
    (path,) = federation.folder.glob("node-3/*/partition-2/000006.*.safetensors")
    kept, trained = read_checked(path), []
    for record in (kept["fedbn-flwr.local"], kept["fedbn-flwr.rules"]):
        for name, value in record.items():
            if name.endswith("num_batches_tracked"):
                trained.append(int(value))
    # A step whose reply was too late for its round may count as well.
    assert all(2 * len(took_part) <= count <= 12 for count in trained)
    assert trained


def test_a_server_app_that_is_killed_and_resumed(federation, begin, in_process) -> None:
    """The run fails, and resumes from its last checkpoint.

    It ends with the bits of a run without the fault.
    """
    how = {"strategy": "fedbn", "checkpoint_every": 1}
    run = begin(**how)
    run.wait_for_round(2)
    for app in apps_of(federation, "superexec-serverapp"):
        os.kill(app, signal.SIGKILL)
    assert ": finished:failed: " in run.error()
    assert 2 <= len(run.lines()) < ROUNDS
    ours = begin(**how, resume=True).end()
    theirs = in_process(**how, num_server_rounds=ROUNDS)
    assert (ours["sha256"], ours["rejected"]) == (theirs["sha256"], 0)


def register(federation: LocalFederation) -> None:
    """Register exactly the keys in the folder with the SuperLink."""
    script = str(ROOT / "docker/register.py")
    command = [sys.executable, script, "federation", str(federation.certs / "cli")]
    subprocess.run(command, env=federation.environment, check=True)


def wait_for(federation: LocalFederation, run: Run, participants: list[int]) -> None:
    """Restart ended services until another round has these participants."""
    before = len(run.lines())
    while not any(
        line["participants"] == participants for line in run.lines()[before:]
    ):
        assert run.under_way(), run.error()
        federation.restart_dead()
        time.sleep(1)


def test_a_key_that_is_revoked_and_then_replaced(federation, begin) -> None:
    """The node fails to return with its old key, and returns with the new key."""
    run = begin(strategy="fedavg", num_server_rounds=12)
    run.wait_for_round(1)
    certs = federation.certs
    try:
        (certs / "cli/node-2.pub").unlink()
        register(federation)
        wait_for(federation, run, [0, 2])
        wait_for(federation, run, [0, 2])
    finally:
        for role in ("node-2", "clientapp-2"):
            shutil.rmtree(certs / role)
        words = [certs, "--add", "2", "--env", "/dev/null"]
        subprocess.run([ROOT / "docker/certs.sh", *words], check=True)
        register(federation)
        for name in ("supernode-2", "superexec-clientapp-2"):
            federation.processes[name].end()
        federation.restart_dead()
    wait_for(federation, run, [0, 1, 2])
    run.end()
