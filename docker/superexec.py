"""flower-superexec for the compose file's services: ``superexec.py ARGUMENTS``.

Flower starts a process for every message and every run by the name of a command,
``flwr-clientapp`` or ``flwr-serverapp``. PATH finds these names in ``starters`` first.
The starters ask for a fork of a process that has already imported torch and Flower. A
new process needs seconds for these imports, and on a busy machine longer than Flower
waits for it. The fork imports the app itself from the run's bundle, and ends with its
message or run. If no fork is available, Flower's own command starts.

SIGTERM goes to the apps first, so that a ServerApp saves its run. The SuperExec gets
SIGTERM when the apps have ended. A SuperExec that fails, for example after a request
that timed out, leaves its apps running. This process, and with it the container, ends
after these apps.
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
# modules that both commands need; an app imports its other modules itself
PRELOADED = (
    "torch",
    "numpy.random",
    "safetensors.numpy",
    "flwr.clientapp",
    "flwr.serverapp",
)
SAVE_SECONDS = 15.0  # less than the stop_grace_period of docker-compose.yml
BIN = Path(sys.executable).parent
# in the image, because a container may not execute files that it writes below /tmp
STARTERS = Path(__file__).parent / "starters"


def main(arguments: Sequence[str]) -> int:
    """Run flower-superexec until it ends, and return its exit code."""
    folder = Path(tempfile.mkdtemp(prefix="superexec-"))
    door = folder / "door"
    # Fork before the ``try`` block, because an app's process exits inside this call, and
    # its exit must not run ``finally``, which removes the folder.
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
        # A SuperExec that has failed leaves its apps running, so wait for them.
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
    """Return the running processes that these processes have started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # The state of the process and its parent follow the program's name, which is in
        # brackets.
        try:
            state, of = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # the process has ended
            continue
        if int(of) in parents and state != "Z":
            found.append(int(stat.parent.name))
    return found


def start_preloaded(path: Path) -> int:
    """Start the process that forks the apps' processes, and return its id.

    It accepts requests at a socket with this path. It ends with this process, because
    the other end of a pipe closes then.
    """
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(str(path))
    door.listen(128)
    over, kept = os.pipe()
    preloaded = os.fork()
    if preloaded == 0:
        os.close(kept)
        sys.argv = serve(door, over)  # returns only in an app's process
        sys.exit(command_of_flower(sys.argv[0])())
    door.close()
    os.close(over)
    return preloaded


def command_of_flower(name: str) -> Callable[[], object]:
    """Return the function of a Flower command, as the command's script finds it."""
    (script,) = entry_points(group="console_scripts", name=name)
    command: Callable[[], object] = script.load()
    return command


def serve(door: socket.socket, over: int) -> list[str]:
    """Fork for each request, and return the words of the request in the fork.

    In this process, the function never returns: the process ends when the pipe ``over``
    closes. An app ends with the process of ``--parent-pid``. Flower names the SuperExec
    there, but the fork names the parent of this process, because it outlasts a
    SuperExec that fails.
    """
    # Import the modules that the forks need. Ignore Ctrl-C, which reaches all processes
    # of the terminal, because this process ends when the pipe closes.
    outlasts = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for module in PRELOADED:
        importlib.import_module(module)
    for name in COMMANDS:
        command_of_flower(name)
    # Remove this folder from the path, so that an app's module never has the name of a
    # file here.
    here = Path(__file__).parent
    sys.path[:] = [path for path in sys.path if Path(path) != here]
    # Exclude the imported modules from garbage collection, so that a fork does not copy
    # their memory.
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

        # Only the fork comes here. Restore the signals and seed NumPy, as in a new
        # process. Python seeds its own generator after a fork.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.modules["numpy.random"].seed()
        # The asking process ends when it has read this byte.
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
