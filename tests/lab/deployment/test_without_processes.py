"""What the commands do around Flower's processes, with none of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fedbn_flwr.errors import ConfigError, EngineError
from fedbn_flwr.lab.deployment import __main__ as commands
from fedbn_flwr.lab.deployment import runs as flower

ROOT = Path(__file__).parents[3]
LAYOUT: Any = SimpleNamespace(
    definition=ROOT / "docker-compose.yml",
    services=lambda: {"cli": SimpleNamespace(command=["flwr-run", "/app", "federation"])},
    environment=lambda service: {},
    prefixes={},
    num_nodes=3,
)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch):
    """``runs(before, after, log)``: Flower's runs before and after the command, and what the command writes."""

    def install(before: list[dict[str, Any]], after: list[dict[str, Any]], log: list[str]) -> None:
        seen = iter([before])
        monkeypatch.setattr(flower, "flower_runs", lambda *_: next(seen, after))

        def stream(command: list[str], environment: Any, on_line: Any) -> list[str]:
            for line in log:
                on_line(line)
            return log

        monkeypatch.setattr(flower, "stream", stream)

    return install


def test_a_run_is_told_from_one_that_somebody_else_began_meanwhile(runs) -> None:
    old, own, other = ({"run-id": number, "status": "finished:completed"} for number in (1, 22, 333))
    runs([old], [old, other, own], ["Successfully started run 22"])
    assert flower.run_app(LAYOUT, "").run_id == 22


@pytest.mark.parametrize("others", [[], [{"run-id": 333, "status": "running"}, {"run-id": 4, "status": "running"}]])
def test_a_run_that_flower_refused_is_an_error_with_its_log(runs, others) -> None:
    runs([], others, ["no such app"])
    with pytest.raises(EngineError, match="no such app"):
        flower.run_app(LAYOUT, "")


@pytest.mark.parametrize(
    "wrong",
    ["num-server-rounds=2 strateg='fedbn'", "seed=1 strateg=\"a=b c='d'\"", {"strateg": "fedbn"}, "strateg.a=1"],
)
def test_a_key_that_the_app_lacks_is_named_before_the_run(runs, wrong: Any) -> None:
    runs([], [], [])
    with pytest.raises(ConfigError, match=r"'strateg[.a]*'.*'strategy'"):
        flower.run_app(LAYOUT, wrong)


@pytest.mark.parametrize("given", ["strategy=\"fedbn\" out='/a strateg=1'", "own.toml", {"strategy": "fedbn"}, ""])
def test_keys_that_the_app_has_are_left_to_flower(runs, given: Any) -> None:
    runs([], [{"run-id": 1, "status": "finished:completed"}], [])
    assert flower.run_app(LAYOUT, given).completed


def test_ctrl_c_during_a_run_says_that_it_goes_on_and_stop_ends_it(
    runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listed = [{"run-id": 1, "status": "finished:completed"}, {"run-id": 22, "status": "running"}]
    runs(listed, listed, [])
    stopped: list[list[str]] = []

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def ends(command: list[str], **_: Any) -> Any:
        stopped.append(command)
        return SimpleNamespace(returncode=len(stopped) - 1, stdout="", stderr="not found")

    monkeypatch.setattr(commands, "run_app", interrupted)
    monkeypatch.setattr(commands, "nodes_online", lambda _: 2)
    monkeypatch.setattr(commands.Layout, "load", lambda _: LAYOUT)
    monkeypatch.setattr(flower.subprocess, "run", ends)
    said = CliRunner().invoke(commands.app, ["run"])
    online, goes_on = said.output.splitlines()
    assert (said.exit_code, goes_on) == (130, "run 22 goes on; `make federation-stop` ends it")
    assert online.startswith("2 of 3 nodes are online; ")
    said = CliRunner().invoke(commands.app, ["stop"])
    assert (said.exit_code, said.output) == (0, "run 22: stopped\n")
    assert stopped == [["flwr", "stop", "22", "federation"]]
    with pytest.raises(EngineError, match="run 3 could not be stopped: not found"):
        commands.stop(["3"])


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("by_environment", [False, True])
def test_make_passes_the_run_config_as_it_is(tmp_path: Path, by_environment: bool) -> None:
    config = "strategy=\"fedbn\" out='/a $b$$' image-size=8 `c` $(d)"
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf '%s' \"$4\"\n")
    python.chmod(0o755)
    command = ["make", "-s", "-o", ".venv/installed", "federation-run", f"BIN={tmp_path}"]
    variables = os.environ | ({"RUN_CONFIG": config} if by_environment else {})
    command += [] if by_environment else [f"RUN_CONFIG={config}"]
    assert subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True).stdout == config


def test_ctrl_c_during_the_start_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor's id is on disk from its start, so that ``down`` finds it even after a SIGKILL."""
    ended: list[bool] = []

    class Supervisor:
        pid = 7
        poll = staticmethod(lambda: None)
        terminate = staticmethod(lambda: ended.append(True))

    def interrupted(seconds: float) -> None:
        assert (tmp_path / "home/supervisor.pid").read_text() == "7\n"
        raise KeyboardInterrupt

    monkeypatch.setattr(commands.subprocess, "Popen", lambda *_, **__: Supervisor)
    monkeypatch.setattr(commands.time, "sleep", interrupted)
    monkeypatch.setattr(commands, "given_variables", lambda *_: ({}, ()))
    with pytest.raises(KeyboardInterrupt):
        commands.up(folder=tmp_path / "home")
    assert ended == [True]
