"""``cli`` shows the run's log to its end, and ends with the run's status."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.checkout import ROOT

FLWR = """#!{python}
import json, pathlib, sys
folder = pathlib.Path({folder!r})
calls = folder / "calls"
with calls.open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
answers = json.loads((folder / "answers").read_text())
answer = answers[sys.argv[1]]
print(answer[0] if len(answer) == 1 else answer.pop(0))
(folder / "answers").write_text(json.dumps(answers))
"""
LOG = "INFO : Starting logstream for run_id `7`\nround 1\nround 2"
GONE = "Connection to the SuperLink is unavailable"
RESUME = "the same command with out='/a' resume=true goes on"


def runs(status: str, details: str = "N/A") -> str:
    """Return the output of ``flwr list`` for a run and another run."""
    other = {"run-id": "3", "status": "running", "status-details": "N/A"}
    own = {"run-id": "7", "status": status, "status-details": details}
    return json.dumps({"success": True, "runs": [other, own]})


@pytest.fixture
def flwr(tmp_path, monkeypatch):
    """Provide ``flwr(run=[...], list=[...], log=[...])`` to make such a command.

    It prints these answers in turn, repeats the last answer, and ends with 0. The
    function returns the file of its calls.
    """

    def make(**answers: list[str]) -> Path:
        path = tmp_path / "flwr"
        path.write_text(FLWR.format(python=sys.executable, folder=str(tmp_path)))
        path.chmod(0o755)
        (tmp_path / "answers").write_text(json.dumps(answers))
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return tmp_path / "calls"

    return make


@pytest.fixture
def run(capfd, monkeypatch) -> Callable:
    """Provide ``run(words...)`` to get the status and the lines of ``cli``.

    The checkout is the image's ``/app``.
    """
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    script, *words = services["cli"]["entrypoint"][1:]
    main = runpy.run_path(str(ROOT / Path(script).relative_to("/app")))["main"]
    return lambda *more: (main(*words, *more), capfd.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("status", "code"),
    [("finished:completed", 0), ("finished:failed", 1), ("finished:stopped", 1)],
)
def test_the_exit_status_is_that_of_the_run(flwr, run, status: str, code: int) -> None:
    calls = flwr(run=["started run 7"], list=[runs(status)])
    more = ["--run-config", "strategy='fedbn' out='/state/a b'"]
    found, lines = run(*more)
    assert found == code
    assert any(f"run 7: {status}" in line for line in lines)
    words = json.loads(calls.read_text().splitlines()[0])
    assert words[-2:] == more
    assert words[:4] == ["run", "/app", "federation", "--stream"]


def test_a_run_that_flower_refuses_is_an_error(flwr, run) -> None:
    flwr(run=["no such app"])
    code, lines = run()
    assert (code, lines[-1]) == (1, "flwr run: refused by Flower")


def test_a_run_that_fails_tells_why_and_how_to_go_on(flwr, run) -> None:
    failed = runs("finished:failed", "No heartbeat received from the task")
    flwr(run=[f"started run 7\n{LOG}\nINFO : {RESUME}"], list=[failed])
    *_, cause, resume = run()[1]
    assert "No heartbeat received from the task" in cause
    assert resume == RESUME


def test_each_line_of_the_log_is_shown_once_though_the_superlink_goes_away(
    flwr, run
) -> None:
    """The SuperLink goes away twice, the second time before any new line.

    Flower repeats the log each time.
    """
    calls = flwr(
        run=[f"started run 7\n{LOG}\n{GONE}"],
        list=["{}", "{}", runs("running"), "{}", runs("finished:completed")],
        log=[f"{LOG}\n{GONE}", f"{LOG}\nround 3\nround 3"],
    )
    code, lines = run()
    assert code == 0
    shown = [line for line in lines if "round" in line]
    assert shown == ["round 1", "round 2", "round 3", "round 3"]
    commands = [json.loads(line)[0] for line in calls.read_text().splitlines()]
    assert commands.count("log") == 2
