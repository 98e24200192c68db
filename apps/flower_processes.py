"""Flower's processes, and ``flwr run`` as a function with its own SuperLink.

A failed run raises an error. In contrast, Flower's own command leaves its SuperLink
running, writes to the user's Flower home, and exits with 0 even if the ServerApp raised
an exception. Here the SuperLink and the home exist only during the call. Each process
runs in its own session and is ended together with its child processes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from click import ClickException

from fedbn_flwr.errors import EngineError

BIN = Path(sys.executable).parent
_START_SECONDS = 90.0


def flower_environment(home: Path) -> dict[str, str]:
    """Return the environment for Flower's commands, with its own Flower home."""
    # The settings prevent telemetry, installations and downloads.
    return {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # The app uses this environment. Another installation of its dependencies would
        # download gigabytes.
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # By default, start a cluster of Ray for this run. Without this value, Ray would
        # join a cluster on this machine, or the cluster in the user's environment
        # variable.
        "RAY_ADDRESS": "local",
    }


class Process:
    """A running process with its log.

    Args:
        command: program and arguments. The program is found on the environment's PATH.
        env: environment of the process.
        log: file to which the output is appended.
        cwd: working directory of the process.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        cwd: Path | None = None,
    ) -> None:
        self.name = Path(command[0]).name
        self._log = log
        # The process gets its own session, with the same number as its process group. A
        # signal to the group therefore reaches all processes that it starts.
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                list(command),
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The id of the process, its session and its process group."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, or None while the process is running."""
        return self._process.poll()

    def said(self) -> str:
        """Return the end of the log."""
        return self._log.read_text(errors="replace")[-3000:]

    def wait_healthy(self, url: str, ca: Path | None = None) -> None:
        """Wait until ``url`` answers.

        Args:
            url: an address of the process.
            ca: file of the authority that signed its certificate. None means no TLS.

        Raises:
            EngineError: there is no answer in time, another process answers, or the
                process ended. The message shows the end of its log.
        """
        deadline = time.monotonic() + _START_SECONDS
        context = ssl.create_default_context(cafile=ca) if ca else None
        state = "did not answer"
        while time.monotonic() < deadline and self.code is None:
            try:
                with urllib.request.urlopen(url, timeout=2, context=context):
                    if _listens(self.pid, urlsplit(url).port or 0):
                        return
                    state = "does not answer, but another process"
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        if self.code is not None:
            state = f"ended with code {self.code}"
        raise EngineError(f"{self.name} {state} at {url}:\n{self.said()}")

    def kill(self) -> None:
        """Kill the process and all processes that it started."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def signal(self, kind: signal.Signals) -> None:
        """Send a signal to the process group."""
        try:
            os.killpg(self.pid, kind)
        except ProcessLookupError:
            return

    def end(self) -> None:
        """End the process and its children by SIGINT, SIGTERM, and then SIGKILL."""
        for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if self.code is None:
                self.signal(kind)
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                continue
            break
        # Kill the whole group, because Ray's processes continue after their parent has
        # ended.
        self.signal(signal.SIGKILL)


def _listens(group: int, port: int) -> bool:
    """Return whether a process of a group listens on a port of this machine.

    The result is True if the system has no ``/proc`` to tell.
    """
    table = Path("/proc/net/tcp")
    if not table.is_file():
        return True
    sockets = set()
    for line in table.read_text().splitlines()[1:]:
        _, address, _, state, *fields = line.split()
        if state == "0A" and int(address.partition(":")[2], 16) == port:
            sockets.add(f"socket:[{fields[5]}]")
    for process in Path("/proc").glob("[0-9]*"):
        # A process or one of its files may be gone.
        with suppress(OSError):
            if os.getpgid(int(process.name)) == group:
                for file in (process / "fd").iterdir():
                    if os.readlink(file) in sockets:
                        return True
    return False


def stream(
    command: Sequence[str],
    env: Mapping[str, str],
    on_line: Callable[[str], None] | None,
) -> list[str]:
    """Run a command, pass each line to ``on_line``, and return the last 40 lines."""
    tail: deque[str] = deque(maxlen=40)
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        for line in process.stdout or ():
            text = re.sub(r"\x1b\[[0-9;]*m", "", line.rstrip())
            tail.append(text)
            if on_line:
                on_line(text)
    except BaseException:
        process.kill()
        raise
    finally:
        process.wait()
    return list(tail)


def flower_runs(env: Mapping[str, str], connection: str) -> list[dict[str, str]]:
    """Return the runs of a SuperLink from ``flwr list``.

    Raises:
        EngineError: the answer is not a list of runs.
    """
    return _listed(env, "runs", "list", connection)


def nodes_online(env: Mapping[str, str], connection: str) -> int:
    """Return the number of nodes that a SuperLink counts as online.

    Raises:
        EngineError: the answer is not a list of nodes.
    """
    nodes = _listed(env, "nodes", "supernode", "list", connection)
    return sum(node["status"] == "online" for node in nodes)


def _listed(env: Mapping[str, str], key: str, *words: str) -> list[dict[str, str]]:
    """Return a list from a ``flwr`` command."""
    command = ["flwr", *words, "--format", "json"]
    answer = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False
    ).stdout
    listed = json.loads(answer)
    if key not in listed:  # for example, if the SuperLink is not reachable
        raise EngineError(f"{' '.join(command)}: {str(listed)[-500:]}")
    found: list[dict[str, str]] = listed[key]
    return found


def why_not_reached(connection: str) -> str:
    """Return why this machine does not reach a SuperLink; "" if it does.

    Flower's commands name an unknown connection, but no other reason, such as an expired
    certificate.

    Args:
        connection: the SuperLink's name in Flower's config.
    """
    from flwr.cli.flower_config import read_superlink_connection

    try:
        found = read_superlink_connection(connection)
    except ClickException:
        return ""
    context = ssl.create_default_context(cafile=found.root_certificates)
    url = f"{'http' if found.insecure else 'https'}://{found.address}/health"
    try:
        urllib.request.urlopen(url, timeout=10, context=context).close()
    except urllib.error.HTTPError:  # an answer
        return ""
    except OSError as error:
        return f"{url}: {getattr(error, 'reason', error)}"
    return ""


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def running(pid: int) -> bool:
    """Return whether a process exists and has not ended; always False for pid 0."""
    # For ``kill``, 0 and negative numbers are process groups.
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # A zombie has ended and waits for its parent. The state is the first word after the
    # program's name. The name is in brackets and may contain any character.
    stat = Path(f"/proc/{pid}/stat")
    if not stat.is_file():
        return True
    state = stat.read_text().rsplit(")", 1)[1].split()[0]
    return state != "Z"


Scalar = str | int | float | bool


def toml_pairs(values: Mapping[str, Scalar]) -> str:
    """Return ``key=value`` pairs in TOML, the format of Flower's command line."""
    return " ".join(f"{key}={_toml(value)}" for key, value in values.items())


def flower_run(
    app: Path,
    *,
    run_config: Mapping[str, Scalar],
    federation_config: Mapping[str, Scalar],
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Run a Flower app in Flower's Ray simulation and wait for its end.

    Args:
        app: folder of the app with its ``pyproject.toml``.
        run_config: overrides for keys of the app's ``[tool.flwr.app.config]``.
        federation_config: flat keys such as ``num-supernodes``,
            ``client-resources-num-cpus`` and ``client-resources-num-gpus`` (below 1,
            several clients share a GPU).
        on_line: called with each line of the run's log.

    Raises:
        EngineError: the SuperLink did not start, Flower refused the app or a setting,
            or the run did not complete. The message shows the last lines of the log.
    """
    # Ray may still write to the folder at its end.
    folder = tempfile.TemporaryDirectory(
        prefix="fedbn-flwr-", ignore_cleanup_errors=True
    )
    with folder as home, _superlink(Path(home)) as env:
        # Run the command to its end on the SuperLink in the home's config.
        command = [str(BIN / "flwr"), "run", str(app), "private", "--stream"]
        if run_config:
            command += ["--run-config", toml_pairs(run_config)]
        if federation_config:
            command += ["--federation-config", toml_pairs(federation_config)]
        tail = stream(command, env, on_line)

        # ``flwr run`` always exits with 0, so ask the SuperLink for the outcome.
        runs = flower_runs(env, "private")
        if len(runs) != 1 or runs[0].get("status") != "finished:completed":
            status = runs[0].get("status", "unknown") if runs else "refused by Flower"
            raise EngineError(
                f"flwr run: {status}. The last lines of its log:\n" + "\n".join(tail)
            )


@contextmanager
def _superlink(home: Path) -> Iterator[dict[str, str]]:
    """Run a simulation SuperLink and yield the environment for ``flwr``."""
    port = free_port()
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "private"\n\n[superlink.private]\naddress ='
        f' "127.0.0.1:{port}"\ninsecure = true\n'
    )
    command = [
        str(BIN / "flower-superlink"),
        "--insecure",
        "--simulation",
        "--isolation",
        "subprocess",
    ]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    env = flower_environment(home)
    process = Process(command, env, home / "superlink.log")
    try:
        process.wait_healthy(f"http://127.0.0.1:{port}/health")
        yield env
    finally:
        process.end()


def _toml(value: Scalar) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # A JSON string is also a TOML string.
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
