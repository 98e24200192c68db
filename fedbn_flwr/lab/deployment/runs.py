"""The runs and nodes of a federation, by Flower's commands in its service ``cli``."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedbn_flwr.engines.flower_run import Scalar, flower_runs, stream, toml_pairs
from fedbn_flwr.errors import EngineError, unknown_name
from fedbn_flwr.lab.deployment.layout import Layout

__all__ = ["Outcome", "follow_run", "nodes_online", "run_app", "stop_run", "unfinished_runs"]

_AWAY_SECONDS = 60.0  # Flower fails a run if the SuperLink is away for longer
_STARTED = re.compile(r"started run (\d+)")
_PAIR = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")  # as Flower reads --run-config
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


def nodes_online(layout: Layout, seconds: float = math.inf) -> int:
    """Return how many nodes are online, says the SuperLink, and came online in the last ``seconds``."""
    answer = _flower(layout, "supernode", "list", _CONNECTION, "--format", "json").stdout
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
        ConfigError: the app has no such key.
        EngineError: Flower refused the run.
    """
    _check_keys(app or layout.definition.parent, run_config)
    environment, prefix = _cli(layout)
    words = list(layout.services()["cli"].command)
    last = "flwr-run" if "flwr-run" in words else "run"  # the latter in a compose file of an earlier version
    words = words[words.index(last) + 1 :]
    if app:
        words = [str(app), _CONNECTION, "--stream"]
    if run_config:
        words += ["--run-config", run_config if isinstance(run_config, str) else toml_pairs(run_config)]
    return follow_run(words, environment, prefix, on_line)


def follow_run(
    words: Sequence[str],
    environment: Mapping[str, str],
    prefix: Sequence[str] = (),
    on_line: Callable[[str], None] | None = None,
) -> Outcome:
    """Do ``flwr run APP CONNECTION ...`` with these words, and wait for the run's end: Flower itself exits with 0.

    Args:
        words: what follows ``flwr run``; the second one is the connection.
        environment: of the command.
        prefix: words before the command.
        on_line: called with each line of the run's log.

    Raises:
        EngineError: Flower refused the run, or the SuperLink went away.
    """
    connection = words[1]
    command = [*prefix, "flwr", "run", *words]
    before = {run["run-id"] for run in flower_runs(environment, connection, prefix)}
    started: list[str] = []  # the id of the run, once Flower has given it

    def note(line: str) -> None:
        started.extend(_STARTED.findall(line))
        if on_line:
            on_line(line)

    tail = stream(command, environment, note)
    # Flower's command ends when the SuperLink goes away; the run continues when the SuperLink is back.
    last_seen = time.monotonic()
    while True:
        try:
            new = [run for run in flower_runs(environment, connection, prefix) if run["run-id"] not in before]
            last_seen = time.monotonic()
        except EngineError:
            if time.monotonic() > last_seen + _AWAY_SECONDS:
                raise
            new = [{"status": "unknown"}]
        if len(new) > 1:  # somebody else began one meanwhile: Flower's command names its own
            new = [run for run in new if str(run["run-id"]) in started]
        if len(new) != 1:
            raise EngineError("flwr run: refused by Flower. The last lines of its log:\n" + "\n".join(tail))
        if new[0]["status"].startswith("finished"):
            return Outcome(new[0]["run-id"], new[0]["status"], tail)
        time.sleep(0.5)


def unfinished_runs(layout: Layout) -> list[str]:
    """Return the ids of the federation's runs that have not ended.

    Raises:
        EngineError: the SuperLink does not answer.
    """
    environment, prefix = _cli(layout)
    runs = flower_runs(environment, _CONNECTION, prefix)
    return [str(run["run-id"]) for run in runs if not run["status"].startswith("finished")]


def stop_run(layout: Layout, run_id: str) -> None:
    """End a run.

    Raises:
        EngineError: Flower refused; the message shows its answer.
    """
    done = _flower(layout, "stop", run_id, _CONNECTION)
    if done.returncode:
        raise EngineError(f"run {run_id} could not be stopped: {(done.stdout + done.stderr).strip()}")


def _cli(layout: Layout) -> tuple[dict[str, str], Sequence[str]]:
    """Return the environment of the service ``cli``, and the words before its commands."""
    return layout.environment(layout.services()["cli"]), layout.prefixes.get("cli", ())


def _flower(layout: Layout, *words: str) -> subprocess.CompletedProcess[str]:
    environment, prefix = _cli(layout)
    return subprocess.run([*prefix, "flwr", *words], env=environment, capture_output=True, text=True, check=False)


def _check_keys(app: Path, run_config: Mapping[str, Scalar] | str) -> None:
    """Raise ConfigError for a key that the app's config lacks: Flower refuses it without its name."""
    known = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"].get("config", {})
    if isinstance(run_config, str):
        pairs = [] if run_config.endswith(".toml") else _PAIR.findall(run_config)
        run_config = dict(pairs)
    for key in run_config:
        if key.partition(".")[0] not in known:
            raise unknown_name("config key", key, known)
