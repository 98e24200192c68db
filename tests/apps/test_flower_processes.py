"""``flower_run`` turns the outcome of Flower's command into a result.

No SuperLink starts. Other tests start processes.
"""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from apps import flower_processes as module
from apps.flower_processes import Process, flower_run, free_port
from fedbn_flwr.errors import EngineError


@pytest.fixture
def commands(monkeypatch):
    """Provide ``commands(runs)`` to set Flower's list of runs after the command.

    It returns the list of commands that were called.
    """
    given = []

    def install(runs: list[dict]) -> list[list[str]]:
        monkeypatch.setattr(module, "_superlink", lambda home: nullcontext({}))
        monkeypatch.setattr(
            module,
            "stream",
            lambda command, env, on_line: given.append(command) or ["last", "lines"],
        )
        monkeypatch.setattr(module, "flower_runs", lambda env, connection: runs)
        return given

    return install


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([{"status": "finished:failed"}], "finished:failed"),
        ([{"status": "finished:stopped"}], "finished:stopped"),
        ([{}], "unknown"),
        ([], "refused by Flower"),
        ([{"status": "finished:completed"}] * 2, "finished:completed"),
    ],
)
def test_all_but_one_completed_run_is_an_error_with_the_log(
    commands, runs, said: str
) -> None:
    commands(runs)
    with pytest.raises(
        EngineError,
        match=rf"^flwr run: {said}\. The last lines of its log:\nlast\nlines$",
    ):
        flower_run(Path("app"), run_config={}, federation_config={})


def test_the_settings_are_toml_for_flowers_command(commands) -> None:
    given = commands([{"status": "finished:completed"}])
    flower_run(
        Path("app"),
        run_config={"strategy": "fedbn", "resume": True},
        federation_config={"num-supernodes": 3},
    )
    (command,) = given
    assert command[1:6] == ["run", "app", "private", "--stream", "--run-config"]
    assert command[6:] == [
        'strategy="fedbn" resume=true',
        "--federation-config",
        "num-supernodes=3",
    ]


@pytest.mark.parametrize("serves", ["itself", "by a child", "another process"])
def test_the_process_that_was_started_is_the_one_that_answers(
    tmp_path, serves: str
) -> None:
    """Another SuperLink at the port may be older, or have other nodes."""
    port = free_port()
    server = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    commands = {
        "itself": [server],
        "by a child": [["sh", "-c", f"{shlex.join(server)} & wait"]],
        "another process": [server, ["sleep", "60"]],
    }[serves]
    started = [Process(one, os.environ, tmp_path / "log") for one in commands]
    try:
        for process in started[:-1]:
            process.wait_healthy(f"http://127.0.0.1:{port}/")
        fails = pytest.raises(EngineError, match="another process")
        with fails if serves == "another process" else nullcontext():
            started[-1].wait_healthy(f"http://127.0.0.1:{port}/")
    finally:
        for process in started:
            process.kill()
