"""A federation over the network, as processes on this machine: for development, tests and benchmarks."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from fedbn_flwr.engines.flower_run import Process, Scalar
from fedbn_flwr.errors import ConfigError, EngineError
from fedbn_flwr.lab.deployment.certificates import CHANNEL_HOST, make_certificates
from fedbn_flwr.lab.deployment.compose import Service, start_order
from fedbn_flwr.lab.deployment.layout import Layout, loopback_addresses
from fedbn_flwr.lab.deployment.runs import Outcome, nodes_online, run_app

__all__ = ["Federation"]

_START_SECONDS = 90.0
_FIRST_PAUSE, _LONGEST_PAUSE, _STEADY_SECONDS = 0.1, 60.0, 10.0


class _Pause:
    """The pause before a service starts again, as Docker's: it doubles with each start, up to a minute.

    After a life of ten seconds there is none.
    """

    def __init__(self) -> None:
        self._seconds, self._began = 0.0, 0.0
        self._ended: float | None = None

    def begin(self) -> None:
        """Note a start."""
        self._began, self._ended = time.monotonic(), None
        self._seconds = min(max(2 * self._seconds, _FIRST_PAUSE), _LONGEST_PAUSE)

    def is_over(self) -> bool:
        """Return whether a service that has ended may start; the first call takes it to have ended now."""
        now = time.monotonic()
        if self._ended is None:
            self._ended = now
            if now - self._began >= _STEADY_SECONDS:
                self._seconds = 0.0
        return now >= self._ended + self._seconds


class Federation:
    """The services of a compose file as processes; a context manager that ends all of them.

    Args:
        definition: the compose file.
        num_nodes: number of nodes; in a folder that was used before, at most its number of keys.
        folder: for state, logs and certificates, kept; default: a temporary folder, removed at the end.
        node_configs: ``--node-config`` of each node instead of its partition.
        variables: variables of the compose file.
        environment: added to the environment of every service.
        addresses: addresses of the services; default: unused loopback addresses.
        prefixes: words before each service's commands, by name.
    """

    def __init__(
        self,
        definition: Path,
        num_nodes: int = 3,
        *,
        folder: Path | None = None,
        node_configs: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        addresses: Mapping[str, str] | None = None,
        prefixes: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._temporary = folder is None
        folder = Path(tempfile.mkdtemp(prefix="fedbn-federation-")) if folder is None else folder.absolute()
        self.layout = Layout(
            definition.absolute(),
            folder,
            num_nodes,
            _addresses(folder, num_nodes) if addresses is None else addresses,
            node_configs,
            variables or {},
            prefixes=prefixes or {},
        )
        self._used = (folder / "certs").exists()
        self._extra = dict(environment or {})
        self._services: dict[str, Service] = {}
        self._processes: dict[str, Process] = {}
        self._pauses: dict[str, _Pause] = defaultdict(_Pause)

    def __enter__(self) -> Federation:
        """Start all services and wait until every node is online."""
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all services."""
        self.close()

    def start(self) -> None:
        """Make the certificates if there are none, start the services in order, and wait until the nodes are online.

        Raises:
            EngineError: a service did not start; the message shows the end of its log.
        """
        layout, began = self.layout, time.monotonic()
        layout.folder.mkdir(parents=True, exist_ok=True)
        self._services = layout.services()
        layout.save()
        if not (layout.folder / "certs").exists():
            _make_certificates(layout)
        (layout.folder / "logs").mkdir(exist_ok=True)
        layout.prepare()
        order = start_order({name: s for name, s in self._services.items() if name != "cli"})
        for service in order:
            for needed, condition in service.needs.items():
                self._await(needed, condition)
            self.launch(service.name)
        for service in order:
            self._await(service.name, "service_completed_successfully" if service.one_shot else "service_healthy")
        self._await_nodes(began)
        for name in self.ended():  # no health check asks a SuperExec itself
            process = self._processes[name]
            raise EngineError(f"{name} ended with code {process.code}:\n{process.said()}")

    def launch(self, name: str) -> Process:
        """Start a service's process."""
        service, layout = self._services[name], self.layout
        environment = {**layout.environment(service), **self._extra}
        log = layout.folder / "logs" / f"{name}.log"
        process = self._processes[name] = Process(service.command, environment, log, layout.state(name))
        self._pauses[name].begin()
        return process

    def process(self, name: str) -> Process:
        """Return a service's process."""
        return self._processes[name]

    def kill(self, name: str) -> None:
        """Kill a service and all processes that it started, like a power failure."""
        self._processes[name].kill()

    def run(
        self, run_config: Mapping[str, Scalar], *, app: Path | None = None, on_line: Callable[[str], None] | None = None
    ) -> Outcome:
        """Run an app with the service ``cli``; see ``run_app``."""
        return run_app(self.layout, run_config, app=app, on_line=on_line)

    def restart_dead(self) -> list[str]:
        """Restart the services that ended, as a restart policy does, and return their names.

        A service that ended soon after its last start waits for its pause.
        """
        due = [name for name in self.ended() if self._pauses[name].is_over()]
        for name in due:
            self.launch(name)
        return due

    def ended(self) -> list[str]:
        """Return the names of the services that ended, and are not one-shot."""
        lasting = {name: self._processes[name] for name in self._processes if not self._services[name].one_shot}
        return [name for name, process in lasting.items() if process.code is not None]

    def close(self) -> None:
        """End all processes, the SuperLink last: it then knows that the nodes left, and accepts them again."""
        for is_last in (False, True):
            processes = [process for name, process in self._processes.items() if (name == "superlink") == is_last]
            for process in processes:
                process.signal(signal.SIGTERM)
            for process in processes:
                process.end()
        if self._temporary:
            shutil.rmtree(self.layout.folder, ignore_errors=True)

    def _await(self, name: str, condition: str) -> None:
        """Wait until a service meets the condition that another service has for it."""
        service, process = self._services[name], self._processes[name]
        must_end = condition == "service_completed_successfully"
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            code = process.code
            if code is None:
                if not must_end and (condition == "service_started" or not service.health or self._answers(service)):
                    return
            elif must_end and code == 0:
                return
            elif self._used and not must_end:
                time.sleep(1)  # for some time Flower refuses the key of a node that was killed
                process = self.launch(name)
            else:
                raise EngineError(f"{name} ended with code {code}:\n{process.said()}")
            time.sleep(0.1)
        raise EngineError(f"{name} is not {condition} after {_START_SECONDS:g} s:\n{process.said()}")

    def _answers(self, service: Service) -> bool:
        environment = self.layout.environment(service)
        return subprocess.run(service.health, env=environment, capture_output=True, check=False).returncode == 0

    def _await_nodes(self, began: float) -> None:
        """Wait until all nodes came online after ``began``; earlier ones may still count as online in the SuperLink."""
        count, deadline = self.layout.num_nodes, time.monotonic() + _START_SECONDS
        while (online := nodes_online(self.layout, time.monotonic() - began)) < count:
            if time.monotonic() > deadline:
                raise EngineError(f"{online} of {count} nodes are online after {_START_SECONDS:g} s")
            refused = self.restart_dead() if self._used else []  # a SuperNode looks healthy before Flower refuses it
            time.sleep(1 if refused else 0.2)


def _make_certificates(layout: Layout) -> None:
    hosts, nodes = layout.addresses, range(1, layout.num_nodes + 1)
    server = dict.fromkeys(hosts[name] for name in ("superlink", CHANNEL_HOST) if name in hosts)
    node_hosts = {k: hosts[f"supernode-{k}"] for k in nodes if f"supernode-{k}" in hosts}
    make_certificates(layout.folder / "certs", layout.num_nodes, list(server), node_hosts=node_hosts)


def _addresses(folder: Path, num_nodes: int) -> Mapping[str, str]:
    """Return loopback addresses for a federation: those in its certificates if it has some, else unused ones.

    Raises:
        ConfigError: the folder has keys for fewer nodes.
    """
    if not (folder / "certs").exists():
        return loopback_addresses(num_nodes, time.time_ns())
    keys = len(list((folder / "certs").glob("node-*")))
    if keys < num_nodes:
        raise ConfigError(
            f"{str(folder)!r} has keys for {keys} nodes, but {num_nodes} are asked for. Start at most {keys} nodes, or "
            "remove the folder to start a new federation."
        )
    return Layout.load(folder).addresses
