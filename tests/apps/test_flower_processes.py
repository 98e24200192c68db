"""``flower_run`` turns the outcome of Flower's command into a result.

No SuperLink starts.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from apps import flower_processes as module
from apps.flower_processes import flower_run
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
