"""The scripts in ``docker`` that start Flower's services.

An app's process is a fork that has torch already, and ends before its SuperExec. A
SuperNode ends with its connection.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from apps.flower_processes import running
from tests.support.checkout import ROOT

SUPERNODE = ROOT / "docker/flower-supernode"
SUPEREXEC = ROOT / "docker/superexec.py"
# This runs the script with two commands of Flower in a folder of the test and a small
# module instead of torch.
RUN = """
import importlib.util, json, os, pathlib, random, signal, sys, time
spec = importlib.util.spec_from_file_location("superexec", {script!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
folder = pathlib.Path({folder!r})
def command():
    import numpy
    if sys.argv[1] == "saves":
        signal.signal(signal.SIGTERM, end)
    facts = [sys.argv, os.getpid(), os.getppid(), "tabnanny" in sys.modules, random.random(), numpy.random.random()]
    (folder / f"{{sys.argv[1]}}.part").write_text(json.dumps(facts))
    (folder / f"{{sys.argv[1]}}.part").rename(folder / sys.argv[1])
    if sys.argv[1] == "saves":
        signal.pause()
    while sys.argv[1] == "works" and not (folder / "done").exists():
        time.sleep(0.01)
def end(*_):
    time.sleep(0.3)
    print("app", file=open("ends", "a"))
    os._exit(0)
module.command_of_flower = lambda name: command
module.PRELOADED = ("numpy.random", "tabnanny")
module.BIN = folder / "bin"
sys.exit(module.main(["--address=a"]))
"""


SUPEREXEC_THAT_SAYS_SO = """
import os, signal
def end(*_):
    print("superexec", file=open("ends", "a"))
    os._exit(3)
signal.signal(signal.SIGTERM, end)
open("stands", "w")
while True:
    signal.pause()
"""


@pytest.fixture
def begin(tmp_path) -> Callable:
    """Provide ``begin(superexec, clientapp)`` to run the script.

    These shell scripts replace Flower's commands.
    """

    def do(superexec: str, clientapp: str = "exit 1") -> subprocess.Popen[bytes]:
        (tmp_path / "bin").mkdir()
        scripts = {"flower-superexec": superexec, "flwr-clientapp": clientapp}
        for name, text in scripts.items():
            path = tmp_path / "bin" / name
            path.write_text(f"#!/bin/bash\ncd {tmp_path}\n{text}\n")
            path.chmod(0o755)
        code = RUN.format(script=str(SUPEREXEC), folder=str(tmp_path))
        given = os.environ | {"TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
        return subprocess.Popen([sys.executable, "-c", code], env=given, cwd=tmp_path)

    return do


def until(path: Path, process: subprocess.Popen[str]) -> str:
    """Return the content of a file once it exists, which the process should write."""
    for _ in range(10000):
        ended = process.poll() is not None
        if path.is_file():
            return path.read_text()
        assert not ended, f"the process has ended without {path}"
        time.sleep(0.01)
    raise AssertionError(f"{path} is not there")


def test_each_message_has_a_process_of_its_own_that_has_imported_already(
    begin, tmp_path
) -> None:
    process = begin(
        "echo $@ > words; flwr-clientapp one --token x; flwr-clientapp two; until [ -e"
        " go ]; do sleep .01; done; exit 7"
    )
    one, two = (json.loads(until(tmp_path / name, process)) for name in ("one", "two"))
    assert one[0] == ["flwr-clientapp", "one", "--token", "x"]
    assert two[0] == ["flwr-clientapp", "two"]
    assert until(tmp_path / "words", process) == "--address=a\n"
    assert one[1] != two[1], "a process of its own"
    assert one[2] == two[2] != process.pid, "forks of one process"
    assert one[3], "which has imported the module"
    assert one[4] != two[4], "no random stream of one is another's"
    assert one[5] != two[5], "nor numpy's"
    assert running(one[2])
    (tmp_path / "go").touch()
    assert process.wait(100) == 7, "the code is the SuperExec's"
    for _ in range(10000):
        if not running(one[2]):
            break
        time.sleep(0.01)
    assert not running(one[2]), "it ends with the SuperExec"
    assert list(tmp_path.glob("superexec-*")) == []
    # In the image, a container executes nothing below /tmp.
    for name in ("flwr-clientapp", "flwr-serverapp"):
        assert os.access(SUPEREXEC.parent / "starters" / name, os.X_OK)


def test_flowers_own_command_starts_where_there_is_no_fork(begin, tmp_path) -> None:
    process = begin(
        "flwr-clientapp one; until [ -e go ]; do sleep .01; done; flwr-clientapp two"
        " three",
        "echo own $@ > part; mv part own",
    )
    os.kill(json.loads(until(tmp_path / "one", process))[2], signal.SIGKILL)
    (tmp_path / "go").touch()
    assert until(tmp_path / "own", process) == "own two three\n"
    assert process.wait(100) == 0


def test_a_server_app_saves_before_its_superexec_ends(begin, tmp_path) -> None:
    process = begin(
        f"flwr-serverapp saves; exec {sys.executable} -c '{SUPEREXEC_THAT_SAYS_SO}'",
    )
    until(tmp_path / "saves", process)
    until(tmp_path / "stands", process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) == 3
    assert (tmp_path / "ends").read_text() == "app\nsuperexec\n"


def test_apps_go_on_when_their_superexec_ends(begin, tmp_path) -> None:
    process = begin("flwr-serverapp works --parent-pid $$ --token x; exit 7")
    facts = json.loads(until(tmp_path / "works", process))
    command = f"flwr-serverapp works --parent-pid {process.pid} --token x"
    assert facts[0] == command.split()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.6)
    assert running(facts[1])
    (tmp_path / "done").touch()
    assert process.wait(100) == 7


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("return", 1),
        ("raise RuntimeError('its fault')", 1),
        ("over.set(); sys.exit(3)", 3),
        ("over.set(); sys.exit(0)", 0),
        # Flower ends with 0 if the SuperLink refuses the node, and tries again after 503.
        ("answer(401); sys.exit(0)", 1),
        ("over.set(); sys.exit(answer(500) - 500)", 3),
    ],
)
def test_a_supernode_without_its_connection_ends(ending: str, code: int) -> None:
    """This applies even if a thread, such as the node's API, would keep the process."""
    lines = [
        "from flwr.supercore.primitives.asymmetric import generate_key_pairs",
        "from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor",
        "import httpx",
        "def answer(status):",
        "    request = types.SimpleNamespace(request=httpx.Request('POST', 'http://a'))",
        "    node = NodeAuthHttpInterceptor(*generate_key_pairs())",
        "    answered = node.intercept(request, lambda _: httpx.Response(status))",
        "    return answered.status_code",
        "import importlib.metadata, runpy, sys, threading, types",
        "over = threading.Event()",
        "def supernode():",
        "    threading.Thread(target=over.wait, args=(200,)).start()",
        f"    {ending}",
        (
            "importlib.metadata.entry_points = lambda **_:"
            " [types.SimpleNamespace(load=lambda: supernode)]"
        ),
        f"runpy.run_path({str(SUPERNODE)!r}, run_name='__main__')",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == code, done.stderr
    assert ("its fault" in done.stderr) == ("its fault" in ending)
