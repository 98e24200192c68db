"""``flwr run`` as a function: a private simulation SuperLink for one run; a failed run is an error.

Flower's own command leaves its SuperLink running, writes to the user's Flower home, and exits with 0 even if the
ServerApp raised an exception. Here the SuperLink and the home exist only during the call.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fedbn_flwr.engines.processes import BIN, Process, flower_environment, flower_runs, free_port, stream
from fedbn_flwr.errors import EngineError

__all__ = ["Scalar", "flower_run", "toml_pairs"]

Scalar = str | int | float | bool


def toml_pairs(values: Mapping[str, Scalar]) -> str:
    """Return the values for Flower's command line: ``key=value`` in TOML, separated by spaces."""
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
        run_config: overrides for keys of the app's ``[tool.flwr.app.config]``.
        federation_config: flat keys such as ``num-supernodes``, ``client-resources-num-cpus``,
            ``client-resources-num-gpus`` (below 1, several clients share a GPU).
        on_line: called with each line of the run's log.

    Raises:
        EngineError: the SuperLink did not start, Flower refused the app or a setting, or the run did not complete;
            the message shows the last lines of the log.
    """
    with tempfile.TemporaryDirectory(prefix="fedbn-flwr-") as home, _superlink(Path(home)) as env:
        command = [str(BIN / "flwr"), "run", str(app), "private", "--stream"]
        if run_config:
            command += ["--run-config", toml_pairs(run_config)]
        if federation_config:
            command += ["--federation-config", toml_pairs(federation_config)]
        tail = stream(command, env, on_line)
        runs = flower_runs(env, "private")
        if len(runs) != 1 or runs[0].get("status") != "finished:completed":
            status = runs[0].get("status", "unknown") if runs else "refused by Flower"
            raise EngineError(f"flwr run: {status}. The last lines of its log:\n" + "\n".join(tail))


@contextmanager
def _superlink(home: Path) -> Iterator[dict[str, str]]:
    """Run a simulation SuperLink on a free loopback port; yield the environment in which ``flwr`` finds it."""
    port = free_port()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "private"\n\n[superlink.private]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    command = [str(BIN / "flower-superlink"), "--insecure", "--simulation", "--isolation", "subprocess"]
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
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
