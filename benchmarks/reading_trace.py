"""Which files of the package a round enters: the process that ``reading.py`` starts in
a checkout.

It does ``fedbn-flwr run`` with FedAvg on the digits, 5 clients in one process, and
notes the file of every function that is entered from the second ``configure_train`` to
the third, in any thread. The last line that it prints has them, as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import threading
import tomllib
from pathlib import Path
from types import FrameType
from typing import Any

SETTINGS = "strategy=fedavg dataset=digits num-clients=5 num-server-rounds=3"


def trace(root: Path) -> list[str]:
    """Do the run of this checkout; return the files of the package that its second
    round enters.
    """
    script = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"][
        "fedbn-flwr"
    ]
    module, _, attribute = script.partition(":")
    command = getattr(importlib.import_module(module), attribute)
    strategy: Any = importlib.import_module("fedbn_flwr.strategies").FedAvg
    configure_train = strategy.configure_train
    entered: set[str] = set()
    current = 0

    def counted(self: Any, server_round: int, *others: Any) -> Any:
        nonlocal current
        current = server_round
        if current == 2:
            sys.setprofile(note)
        return configure_train(self, server_round, *others)

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if current == 2 and event == "call" and frame.f_code.co_name != "<module>":
            entered.add(frame.f_code.co_filename)

    strategy.configure_train = counted
    threading.setprofile(note)
    arguments = ["run", "--workers", "0"]
    for setting in SETTINGS.split():
        arguments += ["--set", setting]
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["fedbn-flwr", *arguments, "--out", f"{folder}/run"]
        try:
            command()
        except SystemExit as end:
            if end.code:
                raise
    sys.setprofile(None)
    return sorted(
        path for path in entered if path.startswith(f"{root / 'fedbn_flwr'}{os.sep}")
    )


if __name__ == "__main__":
    print("\n" + json.dumps(trace(Path.cwd())))
