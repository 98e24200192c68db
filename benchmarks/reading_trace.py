"""What of the package a run enters: the process that ``reading.py`` starts.

    cd CHECKOUT; PYTHONPATH=. python benchmarks/reading_trace.py fixbn

It does ``fedbn-flwr run`` with the method on the digits, 5 clients in one process, and
notes every function of the package that is entered, in any thread: before round 1 (up to
the first ``configure_train``), and in round 2, the first frozen one of FixBN. Functions
that run while a module is imported are left out. The last line that it prints is JSON:
"FILE:LINE NAME" of each function.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import tempfile
import threading
import tomllib
from pathlib import Path
from types import FrameType
from typing import Any

SETTINGS = "dataset=digits num-clients=5 num-server-rounds=3"
PARTS = {0: "before round 1", 2: "a round"}


class Trace:
    """The functions of a folder that are entered, by the part of the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = f"{folder}/"
        self.round = 0
        self.entered: dict[str, set[str]] = {part: set() for part in PARTS.values()}

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call; ``sys.setprofile`` calls this."""
        code = frame.f_code
        if event != "call" or self.round not in PARTS:
            return
        # Skip bodies of modules and classes, comprehensions and lambdas.
        if not code.co_flags & inspect.CO_OPTIMIZED or code.co_name.startswith("<"):
            return
        if code.co_filename.startswith(self._folder) and not self._is_import(frame):
            file = code.co_filename.removeprefix(self._folder)
            place = f"{file}:{code.co_firstlineno} {code.co_name}"
            self.entered[PARTS[self.round]].add(place)

    def _is_import(self, frame: FrameType) -> bool:
        """Return whether a module of the folder is being imported below this call."""
        above = frame.f_back
        while above is not None:
            code = above.f_code
            if code.co_name == "<module>" and code.co_filename.startswith(self._folder):
                return True
            above = above.f_back
        return False


def trace(root: Path, method: str) -> dict[str, list[str]]:
    """Do the run of this checkout; return the functions that it enters."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    module, _, attribute = project["scripts"]["fedbn-flwr"].partition(":")
    command = getattr(importlib.import_module(module), attribute)
    strategy: Any = importlib.import_module("fedbn_flwr.server.strategy").Strategy
    configure_train = strategy.configure_train
    traced = Trace(root / "fedbn_flwr")

    def counted(self: Any, server_round: int, *others: Any) -> Any:
        traced.round = server_round
        return configure_train(self, server_round, *others)

    strategy.configure_train = counted
    arguments = ["run", "--workers", "0", "--set", f"strategy={method}"]
    for setting in SETTINGS.split():
        arguments += ["--set", setting]
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["fedbn-flwr", *arguments, "--out", f"{folder}/run"]
        threading.setprofile(traced.note)
        sys.setprofile(traced.note)
        try:
            command()
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.setprofile(None)
    return {part: sorted(places) for part, places in traced.entered.items()}


if __name__ == "__main__":
    print("\n" + json.dumps(trace(Path.cwd(), sys.argv[1])))
