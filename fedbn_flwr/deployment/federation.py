"""A federation over the network, as processes on this machine: for development, tests and benchmarks."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from fedbn_flwr.deployment.certificates import CHANNEL_HOST, make_certificates
from fedbn_flwr.deployment.compose import Service, start_order
from fedbn_flwr.deployment.layout import Layout, loopback_addresses
from fedbn_flwr.engines.flower_run import Scalar, toml_pairs
from fedbn_flwr.engines.processes import Process, flower_runs, stream
from fedbn_flwr.errors import ConfigError, EngineError

__all__ = ["Federation", "Outcome", "nodes_online", "run_app"]

_START_SECONDS = 90.0
_AWAY_SECONDS = 60.0  # Flower fails a run if the SuperLink is away for longer
_STARTED = re.compile(r"started run (\d+)")
_CONNECTION = "federation"  # its name in docker/flwr.toml


@dataclass(frozen=True)
class Outcome:
    """The end of a run: its id, Flower's status (``finished:completed``, ...), and the last lines of its log."""

    run_id: str
    status: str
    log: list[str]

    @property
    def completed(self) -> bool:
        """Whether the ServerApp finished without error."""
        return self.status == "finished:completed"

    def check(self) -> Outcome:
        """Return itself; raise EngineError unless the run completed."""
        if not self.completed:
            raise EngineError(f"flwr run: {self.status}. The last lines of its log:\n" + "\n".join(self.log))
        return self


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
            hosts, number = layout.addresses, layout.num_nodes
            server = [hosts[name] for name in ("superlink", CHANNEL_HOST) if name in hosts]
            nodes = {k: hosts[f"supernode-{k}"] for k in range(1, number + 1) if f"supernode-{k}" in hosts}
            make_certificates(layout.folder / "certs", number, list(dict.fromkeys(server)), node_hosts=nodes)
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

    def launch(self, name: str) -> Process:
        """Start a service's process."""
        service = self._services[name]
        environment = {**self.layout.environment(service), **self._extra}
        cwd = self.layout.state(name)
        process = Process(service.command, environment, self.layout.folder / "logs" / f"{name}.log", cwd)
        self._processes[name] = process
        return process

    def process(self, name: str) -> Process:
        """Return a service's process."""
        return self._processes[name]

    def kill(self, name: str) -> None:
        """Kill a service and all processes that it started, like a power failure."""
        self._processes[name].kill()

    def restart(self, name: str, seconds: float = _START_SECONDS) -> None:
        """Start a service again, repeatedly until it is healthy (Flower refuses the node's key for some time).

        Raises:
            EngineError: the service is not healthy in time.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.launch(name)
            try:
                return self._await(name, "service_healthy")
            except EngineError:
                time.sleep(1)
        raise EngineError(f"{name} did not come back within {seconds:g} s:\n{self._processes[name].said()}")

    def log(self, name: str) -> str:
        """Return a service's log."""
        return (self.layout.folder / "logs" / f"{name}.log").read_text(errors="replace")

    def run(
        self, run_config: Mapping[str, Scalar], *, app: Path | None = None, on_line: Callable[[str], None] | None = None
    ) -> Outcome:
        """Run an app with the service ``cli``; see ``run_app``."""
        return run_app(self.layout, run_config, app=app, on_line=on_line)

    def restart_dead(self) -> list[str]:
        """Restart the services that ended but are not one-shot, as a restart policy does; return their names."""
        dead = [n for n, p in self._processes.items() if p.code is not None and not self._services[n].one_shot]
        for name in dead:
            self.launch(name)
        return dead

    def close(self) -> None:
        """End all processes, the SuperLink last: it then knows that the nodes left, and accepts them again."""
        last = [process for name, process in self._processes.items() if name == "superlink"]
        for processes in ([process for process in self._processes.values() if process not in last], last):
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
        while (found := nodes_online(self.layout, time.monotonic() - began)) < count:
            if time.monotonic() > deadline:
                raise EngineError(f"{found} of {count} nodes are online after {_START_SECONDS:g} s")
            refused = self.restart_dead() if self._used else []  # a SuperNode looks healthy before Flower refuses it
            time.sleep(1 if refused else 0.2)


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


def nodes_online(layout: Layout, seconds: float = math.inf) -> int:
    """Return how many nodes are online, says the SuperLink, and came online in the last ``seconds``."""
    environment = layout.environment(layout.services()["cli"])
    command = [*layout.prefixes.get("cli", ()), "flwr", "supernode", "list", _CONNECTION, "--format", "json"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout
    try:
        nodes = json.loads(answer).get("nodes", [])
    except json.JSONDecodeError as error:
        raise EngineError(f"flwr supernode list gave no JSON: {answer[-500:]!r}") from error
    return sum(node["status"] == "online" and node["online-elapsed"] <= seconds for node in nodes)


def run_app(
    layout: Layout,
    run_config: Mapping[str, Scalar] | str,
    *,
    app: Path | None = None,
    on_line: Callable[[str], None] | None = None,
) -> Outcome:
    """Run an app as the service ``cli`` does, and wait for its end.

    Args:
        layout: the layout of a running federation.
        run_config: overrides for keys of the app's config, also as text for Flower's command line.
        app: another app than the compose file's folder; it does not get ``cli``'s own run config.
        on_line: called with each line of the run's log.

    Raises:
        EngineError: Flower refused the run.
    """
    cli = layout.services()["cli"]
    environment, prefix = layout.environment(cli), layout.prefixes.get("cli", ())
    command = [*prefix, "flwr", "run", str(app), _CONNECTION, "--stream"] if app else [*cli.command]
    if run_config:
        command += ["--run-config", run_config if isinstance(run_config, str) else toml_pairs(run_config)]
    before = {run["run-id"] for run in flower_runs(environment, _CONNECTION, prefix)}
    own: list[str] = []  # the id of the run, once Flower has given it

    def note(line: str) -> None:
        own.extend(_STARTED.findall(line))
        if on_line:
            on_line(line)

    tail = stream(command, environment, note)
    # Flower's command ends when the SuperLink goes away; the run continues when the SuperLink is back.
    last_seen = time.monotonic()
    while True:
        try:
            new = [run for run in flower_runs(environment, _CONNECTION, prefix) if run["run-id"] not in before]
            last_seen = time.monotonic()
        except EngineError:
            if time.monotonic() > last_seen + _AWAY_SECONDS:
                raise
            new = [{"status": "unknown"}]
        if len(new) > 1:  # somebody else began one meanwhile: Flower's command names its own
            new = [run for run in new if str(run["run-id"]) in own]
        if len(new) != 1:
            raise EngineError("flwr run: refused by Flower. The last lines of its log:\n" + "\n".join(tail))
        if new[0]["status"].startswith("finished"):
            return Outcome(new[0]["run-id"], new[0]["status"], tail)
        time.sleep(0.5)
