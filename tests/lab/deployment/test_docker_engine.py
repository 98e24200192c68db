"""Docker runs ``docker-compose.yml`` if its command and an engine are present.

See ``docker/engine``.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.support.checkout import ROOT
from tests.support.runs import QUICK, summary_of

SETTINGS = {**QUICK, "eval-every": 2}


def docker(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``docker`` in the checkout without variables for the federation.

    A shell or ``.env`` may have set them.
    """
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("FEDBN_UID", "FEDBN_GID", "COMPOSE"))
    }
    return subprocess.run(
        ["docker", *words],
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def answers(*words: str) -> bool:
    try:
        return docker(*words).returncode == 0
    except OSError:
        return False


@pytest.fixture
def compose(tmp_path) -> Iterator[Callable]:
    """Provide ``compose(words...)`` to run docker compose in a project of its own.

    The project is removed afterwards.
    """
    subprocess.run(
        [ROOT / "docker/certs.sh", tmp_path / "certs", "--env", tmp_path / ".env"],
        check=True,
    )
    words = [
        "compose",
        "--env-file",
        str(tmp_path / ".env"),
        "--project-name",
        f"fedbn-test-{os.getpid()}",
    ]

    def do(*more: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = docker(*words, *more, CERTS=str(tmp_path / "certs"))
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    yield do
    do("--profile", "*", "down", "--volumes", "--timeout", "5")


@pytest.mark.slow
@pytest.mark.skipif(not answers("version"), reason="no docker engine answers")
def test_containers_give_the_bits_of_the_run_in_process(
    compose, in_process, same_run, tmp_path
) -> None:
    """The images build, the federation starts, and ``down`` leaves nothing behind.

    A run that fails reports it.
    """
    compose("build")
    compose("up", "--detach", "--wait")

    def run(settings: Mapping[str, object]) -> subprocess.CompletedProcess[str]:
        return compose(
            "run",
            "--rm",
            "cli",
            "--run-config",
            " ".join(f"{k}={v!r}" for k, v in settings.items()),
            check=False,
        )

    out = "/state/flwr/fedbn-runs/first"
    done = run({**SETTINGS, "strategy": "fedbn", "out": out})
    assert done.returncode == 0, done.stdout + done.stderr
    assert run({**SETTINGS, "strategy": "fedbn", "out": out}).returncode == 1, (
        "the folder is in use"
    )
    for _ in range(2):  # the second time the folder exists
        compose("cp", f"superexec-serverapp:{out}/.", str(tmp_path / "copy"))
    ours = summary_of(tmp_path / "copy")
    same_run(ours, in_process(**SETTINGS, strategy="fedbn"))
    assert ours["rejected"] == 0
    # The channel has a network of its own.
    done = run({**SETTINGS, "strategy": "fedtan", "out": f"{out}-fedtan"})
    assert done.returncode == 0, done.stdout + done.stderr
    compose("cp", f"superexec-serverapp:{out}-fedtan/.", str(tmp_path / "fedtan"))
    same_run(
        summary_of(tmp_path / "fedtan"),
        in_process(**SETTINGS, strategy="fedtan"),
    )
    compose("down", "--timeout", "20")
    assert compose("ps", "--all", "--quiet").stdout == ""
