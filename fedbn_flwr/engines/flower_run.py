"""``flwr run`` as a function: a private simulation SuperLink for one run, and the run's true outcome.

Flower's own command leaves its managed SuperLink running, writes to the user's Flower home, and exits 0 even when the
ServerApp raised. Here the SuperLink and the home belong to the call and are gone when it returns, and a failed run is
an error.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedbn_flwr.errors import EngineError

__all__ = ["Scalar", "flower_run", "toml_pairs"]

Scalar = str | int | float | bool
_START_SECONDS = 60.0
_BIN = Path(sys.executable).parent


def toml_pairs(values: Mapping[str, Scalar]) -> str:
    """Return the values as Flower's command line takes them: ``key=value`` in TOML, separated by spaces."""
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
        app: folder of the app (with its ``pyproject.toml``).
        run_config: overrides of the app's ``[tool.flwr.app.config]``; keys must stand there.
        federation_config: flat keys such as ``num-supernodes``, ``client-resources-num-cpus``,
            ``client-resources-num-gpus`` (several clients share a GPU where it is below 1).
        on_line: called with each line of the run's log.

    Raises:
        EngineError: the SuperLink did not start, Flower refused the app or a setting, or the run did not complete;
            with the last lines of the log.
    """
    with tempfile.TemporaryDirectory(prefix="fedbn-flwr-") as home, _superlink(Path(home)) as env:
        command = [str(_BIN / "flwr"), "run", str(app), "private", "--stream"]
        if run_config:
            command += ["--run-config", toml_pairs(run_config)]
        if federation_config:
            command += ["--federation-config", toml_pairs(federation_config)]
        tail = _stream(command, env, on_line)
        runs = _runs(env)
        if len(runs) != 1 or runs[0].get("status") != "finished:completed":
            status = runs[0].get("status", "unknown") if runs else "refused by Flower"
            raise EngineError(f"flwr run: {status}. Its last words:\n" + "\n".join(tail))


def _stream(command: Sequence[str], env: Mapping[str, str], on_line: Callable[[str], None] | None) -> list[str]:
    """Run a command, hand its lines on, and return the last 40."""
    tail: list[str] = []
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for line in process.stdout or ():
            text = re.sub(r"\x1b\[[0-9;]*m", "", line.rstrip())
            tail = [*tail[-39:], text]
            if on_line:
                on_line(text)
    finally:
        process.kill() if process.poll() is None and sys.exc_info()[0] else process.wait()
    return tail


def _runs(env: Mapping[str, str]) -> list[dict[str, str]]:
    command = [str(_BIN / "flwr"), "list", "private", "--format", "json"]
    answer = subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout
    try:
        found = json.loads(answer)
    except json.JSONDecodeError as error:
        raise EngineError(f"flwr list gave no JSON: {answer[-500:]!r}") from error
    runs: list[dict[str, str]] = found.get("runs", [])
    return runs


@contextmanager
def _superlink(home: Path) -> Iterator[dict[str, str]]:
    """Run a simulation SuperLink on a free loopback port; yield the environment in which ``flwr`` finds it."""
    port = _free_port()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "private"\n\n[superlink.private]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    env = {
        **os.environ,
        "PATH": f"{_BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # The app runs in this environment: installing its dependencies again would fetch gigabytes.
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    log_path = home / "superlink.log"
    command = [str(_BIN / "flower-superlink"), "--insecure", "--simulation", "--isolation", "subprocess"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_healthy(process, port, log_path)
        yield env
    finally:
        _end(process)


def _wait_healthy(process: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    state = "did not answer" if process.poll() is None else f"ended with code {process.returncode}"
    raise EngineError(f"flower-superlink {state} on port {port}:\n{log_path.read_text()[-2000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the SuperLink and all it started: the session's process group, politely, then not."""
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
            process.wait(timeout=10)
        except (ProcessLookupError, PermissionError):
            return
        except subprocess.TimeoutExpired:
            continue


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _toml(value: Scalar) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
