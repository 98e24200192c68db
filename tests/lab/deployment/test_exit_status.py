"""The service ``cli`` ends with the status of the run, which Flower's own command does not tell."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedbn_flwr.lab.deployment.__main__ import app
from fedbn_flwr.lab.deployment.compose import read_services

ROOT = Path(__file__).parents[3]
FLWR = """#!{python}
import json, pathlib, sys
folder = pathlib.Path({folder!r})
if sys.argv[1] == "run":
    (folder / "words").write_text(json.dumps(sys.argv[2:]))
    print("Successfully started run 7")
else:
    began = (folder / "words").exists()
    runs = [dict({{"run-id": "3", "status": "running"}})] + [dict({{"run-id": "7", "status": {status!r}}})] * began
    print(json.dumps({{"success": True, "runs": runs[: 1 + {listed}]}}))
"""


@pytest.fixture
def flwr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``flwr(status, listed=1)``: a command of this name that ends with 0, and whose run ends with this status."""

    def make(status: str, listed: int = 1) -> Path:
        path = tmp_path / "flwr"
        path.write_text(FLWR.format(python=sys.executable, folder=str(tmp_path), status=status, listed=listed))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return tmp_path / "words"

    return make


def words_of_cli() -> list[str]:
    command = list(read_services(ROOT / "docker-compose.yml", {})["cli"].command)
    assert command[:3] == ["python", "-m", "fedbn_flwr.lab.deployment"]
    return command[3:]


@pytest.mark.parametrize(
    ("status", "code"), [("finished:completed", 0), ("finished:failed", 1), ("finished:stopped", 1)]
)
def test_the_exit_status_is_that_of_the_run(flwr, status: str, code: int) -> None:
    words = flwr(status)
    more = ["--run-config", "strategy='fedbn' out='/state/a b'"]
    done = CliRunner().invoke(app, [*words_of_cli(), *more])
    assert done.exit_code == code, done.output
    assert f"run 7: {status}" in done.output
    assert json.loads(words.read_text()) == [*words_of_cli()[1:], *more], "as under flwr run"


def test_a_run_that_flower_refuses_is_an_error(flwr) -> None:
    flwr("", listed=0)
    done = CliRunner().invoke(app, words_of_cli())
    assert done.exit_code == 1
    assert "refused by Flower" in str(done.exception)
