"""A federation on this machine without Docker: Flower's own processes.

It uses TLS, node keys and SuperExec secrets. For several machines, see
docs/deployment.md::

    make certs NODES=3
    python apps/local_federation.py --nodes 3    # runs until Ctrl-C
    export FLWR_HOME=runs/federation/flwr
    flwr run . federation --stream --run-config "num-clients=3"
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

from apps.flower_processes import (
    Process,
    Scalar,
    flower_environment,
    nodes_online,
    stream,
    toml_pairs,
)
from fedbn_flwr.errors import EngineError

ROOT = Path(__file__).resolve().parents[1]
# Seconds; a process that ends sooner has failed. A refused node ends within seconds.
STAYS_UP = 20.0
# Seconds in which a process may fail. After each crash of a node, the SuperLink refuses
# it for 44 s, and it may crash a second time before it stays up.
PATIENCE = 180.0


def make_certificates(folder: Path, nodes: int, hosts: Sequence[str] = ()) -> None:
    """Write the keys and certificates of ``make certs``, without an ``.env``."""
    words = ["--nodes", str(nodes), "--hosts", ",".join(hosts), "--env", "/dev/null"]
    subprocess.run([ROOT / "docker/certs.sh", folder, *words], check=True)


class LocalFederation:
    """The processes of a federation, with the keys in ``certs``.

    The SuperLink has ``port``, node K has ``port + K``.
    """

    def __init__(
        self, folder: Path, certs: Path, nodes: int, port: int, configs: Sequence[str]
    ) -> None:
        self.folder = folder.absolute()
        self.certs = certs.absolute()
        self.nodes = nodes
        self.port = port
        self.environment = flower_environment(self.folder / "flwr")
        self.environment["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.05"  # seconds
        self.processes: dict[str, Process] = {}
        self.started: dict[str, float] = {}  # by ``time.monotonic``
        self._lock: int | None = None  # the open folder

        # The SuperLink and each SuperNode have a SuperExec, which starts the processes
        # of their apps.
        self.commands = {
            "superlink": [
                "flower-superlink",
                "--enable-supernode-auth",
                f"--database={self.folder}/superlink.db",
                *self._api("superlink", port),
            ],
            "superexec-serverapp": self._superexec("serverapp", port),
        }
        for n in range(1, nodes + 1):
            config = (
                f"partition-id={n - 1} num-partitions={nodes}"
                f" state-dir='{self.folder}/node-{n}'"
            )
            if configs:
                config = configs[n - 1]
            clients = self._superexec(f"clientapp-{n}", port + n)
            self.commands[f"supernode-{n}"] = self._supernode(n, config)
            self.commands[f"superexec-clientapp-{n}"] = clients

    def _supernode(self, node: int, config: str) -> list[str]:
        return [
            sys.executable,
            f"{ROOT}/docker/flower-supernode",
            "--node-config",
            config,
            f"--superlink=127.0.0.1:{self.port}",
            f"--root-certificates={self.certs}/cli/ca.crt",
            f"--auth-supernode-private-key={self.certs}/node-{node}/node.key",
            *self._api(f"node-{node}", self.port + node),
        ]

    def _superexec(self, role: str, port: int) -> list[str]:
        certs = self.certs / role
        return [
            sys.executable,
            f"{ROOT}/docker/superexec.py",
            f"--runtime-api-address=127.0.0.1:{port}",
            f"--root-certificates={certs}/ca.crt",
            f"--superexec-auth-secret-file={certs}/superexec.secret",
        ]

    def _api(self, role: str, port: int) -> list[str]:
        certs = self.certs / role
        return [
            "--host=127.0.0.1",
            f"--port={port}",
            f"--ssl-ca-certfile={certs}/ca.crt",
            f"--ssl-certfile={certs}/server.crt",
            f"--ssl-keyfile={certs}/server.key",
            "--isolation=process",
            f"--superexec-auth-secret-file={certs}/superexec.secret",
        ]

    def start(self) -> None:
        """Start all processes, each after those that it needs.

        The database of an earlier start stays, so the nodes keep their ids.

        Raises:
            EngineError: the folder or a port is in use, a process does not start, or
                the nodes do not connect.
        """
        self._reserve()
        (self.folder / "flwr").mkdir(exist_ok=True)

        # Start the SuperLink, and register the nodes' keys before the nodes connect.
        ca = self.certs / "cli/ca.crt"
        connection = f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{ca}"\n'
        config = f"[superlink.federation]\n{connection}"
        (self.folder / "flwr/config.toml").write_text(config)
        superlink = self.launch("superlink")
        superlink.wait_healthy(f"https://127.0.0.1:{self.port}/health", ca)
        subprocess.run(
            [
                sys.executable,
                f"{ROOT}/docker/register.py",
                "federation",
                f"{self.certs}/cli",
            ],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            check=True,
        )

        self.launch("superexec-serverapp")
        # Nodes that were killed count as online for up to 44 s, and the SuperLink
        # refuses their keys so long.
        self._wait_for(0)
        for node in range(1, self.nodes + 1):
            supernode = self.launch(f"supernode-{node}")
            supernode.wait_healthy(f"https://127.0.0.1:{self.port + node}/health", ca)
            self.launch(f"superexec-clientapp-{node}")
        self._wait_for(self.nodes)

    def _reserve(self) -> None:
        """Lock the folder, and check that all ports are free, before any change."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EngineError(
                f"--folder {self.folder}: another federation runs there. End it, or"
                " name another folder and another --port."
            ) from None
        for port in range(self.port, self.port + self.nodes + 1):
            try:
                socket.create_server(("127.0.0.1", port)).close()
            except OSError as error:
                raise EngineError(
                    f"--port {self.port}: the federation needs the ports {self.port} to"
                    f" {self.port + self.nodes}. {error}. End the process that uses the"
                    " port, or name another port."
                ) from error

    def _wait_for(self, online: int) -> None:
        """Wait until the SuperLink counts this number of nodes as online."""
        deadline = time.monotonic() + PATIENCE
        while nodes_online(self.environment, "federation") != online:
            if time.monotonic() > deadline:
                ends = [f"{n}:\n{p.said()}" for n, p in self.processes.items()]
                raise EngineError(
                    f"not {online} nodes are online after {PATIENCE:g} s. The ends of"
                    " the logs:\n" + "\n".join(ends)
                )
            self.restart_dead()

    def launch(self, name: str) -> Process:
        """Start one process; its log is ``NAME.log``."""
        command, log = self.commands[name], self.folder / f"{name}.log"
        process = Process(command, self.environment, log, self.folder)
        self.processes[name] = process
        self.started[name] = time.monotonic()
        return process

    def restart_dead(self) -> list[str]:
        """Start ended processes again, as Docker does, and return their names."""
        ended = self.processes.items()
        dead = [name for name, process in ended if process.code is not None]
        for name in dead:
            self.launch(name)
        return dead

    def watch(self) -> None:
        """Start ended processes again, and print their names, until all are given up.

        A process that fails again and again is given up: it is not started again, and
        the end of its log is printed.
        """
        failing_since: dict[str, float] = {}
        while self.processes:
            time.sleep(1)
            now = time.monotonic()
            for name, process in [*self.processes.items()]:
                if process.code is None:
                    continue
                if now - self.started[name] > STAYS_UP:
                    failing_since[name] = now
                how = f"with exit code {process.code}"
                if process.code < 0:
                    how = f"by signal {-process.code}"
                if now - failing_since.setdefault(name, now) < PATIENCE:
                    self.launch(name)
                    print(f"{name} has ended {how} and is started again", flush=True)
                    continue
                del self.processes[name]
                print(
                    f"{name} has ended {how}. No start stayed up for {STAYS_UP:g} s in"
                    f" {PATIENCE:g} s, so it is not started again. If its log says"
                    " Failed to activate SuperNode, its key was revoked or is not"
                    " registered (docs/deployment.md). Remove the cause and start this"
                    f" program again. The end of its log:\n{process.said()}",
                    flush=True,
                )

    def run(self, run_config: Mapping[str, Scalar], app: Path = ROOT) -> None:
        """Run an app and wait for its end; EngineError unless it completes."""
        command = [
            sys.executable,
            f"{ROOT}/docker/run.py",
            str(app),
            "federation",
            "--stream",
            "--run-config",
            toml_pairs(run_config),
        ]
        log = stream(command, self.environment, None)
        if not log[-1].endswith(": finished:completed"):
            raise EngineError("\n".join(log))

    def close(self) -> None:
        """End all processes, the SuperLink last, so that the nodes can sign off."""
        last = self.processes.pop("superlink", None)
        others = [*self.processes.values()]
        for processes in (others, [last] if last else []):
            for process in processes:
                process.signal(signal.SIGTERM)
            for process in processes:
                process.end()
        self.processes.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Run a federation on this machine until Ctrl-C."
    )
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument(
        "--folder",
        type=Path,
        default="runs/federation",
        help="folder for state and logs",
    )
    parser.add_argument(
        "--certs",
        type=Path,
        default="certs",
        help="folder that `make certs` has written",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        help="port of the SuperLink; node K uses PORT + K",
    )
    parser.add_argument(
        "--node-config",
        dest="configs",
        action="append",
        help="config of a node; repeat for each node",
    )
    # Treat SIGTERM like Ctrl-C, so that a signal to this script also ends the
    # federation.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    federation = LocalFederation(**vars(parser.parse_args()))
    with suppress(KeyboardInterrupt), closing(federation):
        try:
            federation.start()
        except EngineError as error:
            federation.close()
            parser.exit(1, f"{error}\n")
        print(
            f"{federation.nodes} nodes are up; FLWR_HOME={federation.folder}/flwr",
            flush=True,
        )
        federation.watch()
