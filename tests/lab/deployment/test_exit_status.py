"""``cli`` ends with the run's status, which Flower's command does not tell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
FLWR = """#!{python}
import json, pathlib, sys
folder = pathlib.Path({folder!r})
if sys.argv[1] == "run":
    (folder / "words").write_text(json.dumps(sys.argv[2:]))
    print("Successfully started run 7" if {started} else "no such app")
else:
    runs = [dict({{"run-id": "3", "status": "running"}}), dict({{"run-id": "7", "status": {status!r}}})]
    print(json.dumps({{"success": True, "runs": runs}}))
"""


@pytest.fixture
def flwr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``flwr(status)``: a command of this name that ends with 0, and whose run ends
    with this status.
    """

    def make(status: str, started: bool = True) -> Path:
        path = tmp_path / "flwr"
        path.write_text(
            FLWR.format(
                python=sys.executable,
                folder=str(tmp_path),
                status=status,
                started=started,
            )
        )
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return tmp_path / "words"

    return make


def run(*more: str) -> subprocess.CompletedProcess[str]:
    """Run the command of ``cli`` with the checkout as the image's ``/app``."""
    cli = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["cli"][
        "entrypoint"
    ]
    assert cli[:2] == ["python", "/app/docker/run.py"]
    command = [sys.executable, str(ROOT / "docker/run.py"), *cli[2:], *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("status", "code"),
    [("finished:completed", 0), ("finished:failed", 1), ("finished:stopped", 1)],
)
def test_the_exit_status_is_that_of_the_run(flwr, status: str, code: int) -> None:
    words = flwr(status)
    more = ["--run-config", "strategy='fedbn' out='/state/a b'"]
    done = run(*more)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-1] == f"run 7: {status}"
    assert json.loads(words.read_text())[-2:] == more
    assert json.loads(words.read_text())[:3] == ["/app", "federation", "--stream"]


def test_a_run_that_flower_refuses_is_an_error(flwr) -> None:
    flwr("", started=False)
    done = run()
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "flwr run: refused by Flower"
