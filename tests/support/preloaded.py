"""Fast commands that are forks of a process with all imports done.

The imports take a fresh process seconds, and the tests start dozens. The imports of a
fresh process are tested in tests/test_startup.py and tests/test_packaging.py. Flower's
two commands import the package again, from an app's bundle.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from tests.support.checkout import ROOT

SLOW = (
    "matplotlib.backends.backend_agg",
    "onnxscript",
    "opacus",
    "sklearn.datasets",
    "torchvision.models",
)
"""What some commands of the tests import and takes long."""
FLOWERS = ("flwr-clientapp", "flwr-serverapp")
COMMAND = """#!{python} -IS
import json, os, socket, sys
if sys.argv[1:] and sys.argv[1].endswith("superexec.py"):  # itself a process that forks, and ends with its group
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
    line.connect({address!r})
    asked = json.dumps([{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)])
    socket.send_fds(line, [asked.encode()], [0, 1, 2])
    code = int(line.recv(16))
sys.exit(code)
"""


@contextmanager
def commands(folder: Path, root: Path = ROOT) -> Iterator[Path]:
    """Yield a folder of the commands, for a PATH.

    Args:
        folder: a short path.
        root: the checkout of the commands' package.
    """
    address = str(folder / "socket")
    for name in ("fedbn-flwr", "python", *FLOWERS):
        (folder / name).write_text(
            COMMAND.format(python=sys.executable, address=address, name=name)
        )
        (folder / name).chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, "-m", __name__, address],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=subprocess.DEVNULL,
    )
    try:
        while not os.path.exists(address):
            assert server.poll() is None, "the process cannot be started"
            time.sleep(0.05)
        yield folder
    finally:
        server.kill()
        server.wait()


def serve(address: str) -> None:
    """Run commands, each in a fork."""
    gc.freeze()  # so that the garbage collection of a fork copies less memory
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(f"{address}.new")
        door.listen()
        os.rename(f"{address}.new", address)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            line, _ = door.accept()
            asked, files, _, _ = socket.recv_fds(line, 1 << 18, 3)
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                door.close()
                work = multiprocessing.get_context("fork").Process(
                    target=do, args=(files, *json.loads(asked))
                )
                work.start()
                work.join()
                line.send(str((work.exitcode or 0) % 256).encode())
                os._exit(0)
            line.close()
            for file in files:
                os.close(file)


def do(
    files: list[int],
    name: str,
    arguments: list[str],
    cwd: str,
    environment: dict[str, str],
) -> None:
    """Run a command as a fresh interpreter does."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    python_path = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = ["", *filter(None, python_path)]
    if name == "fedbn-flwr":
        sys.argv = [name, *arguments]
        app()
        return
    if name in FLOWERS:
        for module in [
            module
            for module in sys.modules
            if module.split(".")[0] in ("fedbn_flwr", "tests")
        ]:
            del sys.modules[module]
        sys.argv = [name, *arguments]
        (command,) = entry_points(group="console_scripts", name=name)
        command.load()()
        return
    first, *rest = arguments
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first in ("-", "-c"):
        code = rest.pop(0) if first == "-c" else sys.stdin.read()
        sys.argv = [first, *rest]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[0] = arguments, str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    for slow in SLOW:
        with suppress(ImportError):  # an extra is missing
            importlib.import_module(slow)

    import fedbn_flwr.lab.runs.run  # noqa: F401
    from fedbn_flwr.lab.cli import app

    serve(sys.argv[1])
