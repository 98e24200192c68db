"""flower-superexec for the compose file's services: ``superexec.py ARGUMENTS``.

Flower starts a process for every message and every run, by the name of a command,
``flwr-clientapp`` or ``flwr-serverapp``. These names are found in ``starters`` first:
the process is then a fork of one that has imported torch and Flower, which takes a new
one seconds, and on a busy machine longer than Flower waits for it. It imports the app
itself, from the run's bundle, and ends with its message or run as ever. Where no fork
can be had, Flower's own command starts.

SIGTERM goes to the apps first, so that a ServerApp saves its run; the SuperExec follows
when they have ended. One that ends by itself, after a single request that timed out,
leaves its apps at work: this process, and with it the container, ends after them.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path

COMMANDS = ("flwr-clientapp", "flwr-serverapp")
# What each of them needs; an app imports the rest.
PRELOADED = (
    "torch",
    "numpy.random",
    "safetensors.numpy",
    "flwr.clientapp",
    "flwr.serverapp",
)
SAVE_SECONDS = 15.0  # less than the stop_grace_period of docker-compose.yml
BIN = Path(sys.executable).parent
# in the image: a container may not execute what it writes below /tmp
STARTERS = Path(__file__).parent / "starters"


def main(arguments: Sequence[str]) -> int:
    """Run flower-superexec until it ends, and return its exit code."""
    folder = Path(tempfile.mkdtemp(prefix="superexec-"))
    door = folder / "door"
    # before the block below, whose end is not that of an app's process
    preloaded = start_preloaded(door)
    environment = {
        **os.environ,
        "SUPEREXEC_DOOR": str(door),
        "SUPEREXEC_BIN": str(BIN),
        "SUPEREXEC_PYTHON": sys.executable,
        "PATH": f"{STARTERS}{os.pathsep}{os.environ['PATH']}",
    }
    command = [BIN / "flower-superexec", *arguments]
    try:
        superexec = subprocess.Popen(command, env=environment)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: end(superexec, preloaded, number))
        code = superexec.wait()
        # one that has failed leaves its apps at work
        while children(preloaded):
            time.sleep(0.2)
        return code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def end(superexec: subprocess.Popen[bytes], preloaded: int, number: int) -> None:
    """Send a signal to the apps, and to the SuperExec after them or after a while."""
    deadline = time.monotonic() + SAVE_SECONDS
    for app in children(superexec.pid, preloaded):
        os.kill(app, number)
    while children(superexec.pid, preloaded) and time.monotonic() < deadline:
        time.sleep(0.05)
    superexec.send_signal(number)


def children(*parents: int) -> list[int]:
    """Return the processes that these have started, and that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # after the program's name, which is in brackets: its state and its parent
        try:
            state, of = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended meanwhile
            continue
        if int(of) in parents and state != "Z":
            found.append(int(stat.parent.name))
    return found


def start_preloaded(path: Path) -> int:
    """Start the process of which the apps' are forks, and return its id.

    It is asked by a socket at this path. It ends with this process, whatever the
    reason: the other end of a pipe closes then.
    """
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(str(path))
    door.listen(128)
    over, kept = os.pipe()
    preloaded = os.fork()
    if preloaded == 0:
        os.close(kept)
        sys.argv = serve(door, over)  # from here on, this is an app's process
        sys.exit(command_of_flower(sys.argv[0])())
    door.close()
    os.close(over)
    return preloaded


def command_of_flower(name: str) -> Callable[[], object]:
    """Return the function behind a command of Flower's, as its own script finds it."""
    (script,) = entry_points(group="console_scripts", name=name)
    command: Callable[[], object] = script.load()
    return command


def serve(door: socket.socket, over: int) -> list[str]:
    """Fork for each request, and return its words in the fork.

    It never returns in this process, which ends with ``over``. An app ends when the
    process of ``--parent-pid`` has: the SuperExec for Flower, here the one that
    outlasts it.
    """
    # Import what the forks need. Ctrl-C reaches the whole group; the pipe says when it
    # is over
    outlasts = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for module in PRELOADED:
        importlib.import_module(module)
    for name in COMMANDS:
        command_of_flower(name)
    # An app finds no module here that is named as its own.
    here = Path(__file__).parent
    sys.path[:] = [path for path in sys.path if Path(path) != here]
    # a fork need not copy what its garbage collection looks at
    gc.freeze()

    while True:
        ready, _, _ = select.select([door, over], [], [])
        if over in ready:
            os._exit(0)
        line, _ = door.accept()
        words = line.recv(1 << 16)
        if not words or os.fork():
            line.close()
            continue

        # In the fork: as a new process, also in its random numbers; Python's own
        # generator sees to that itself.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.modules["numpy.random"].seed()
        # the asking process leaves when it has read this
        line.send(b"1")
        line.close()
        door.close()
        command: list[str] = json.loads(words)
        for place, word in enumerate(command[:-1], start=1):
            if word == "--parent-pid":
                command[place] = str(outlasts)
        return command


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
