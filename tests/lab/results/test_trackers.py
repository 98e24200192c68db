"""The lines of the page send the rounds to TensorBoard."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from types import ModuleType

from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.results.folder import RunFolder
from tests.support.checkout import ROOT

PAGE = ROOT / "docs/reference/output-folder.md"


def test_the_lines_of_the_page_bring_each_round_to_tensorboard(
    tmp_path, monkeypatch
) -> None:
    sent = []

    class Writer(contextlib.nullcontext[None]):
        def __enter__(self):
            return self

        def add_scalar(self, *scalar) -> None:
            sent.append(scalar)

    stub = ModuleType("torch.utils.tensorboard")
    stub.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("runs/read"), Config.make({}))
    for number in (1, 2):
        folder.add_round({"round": number, "phase": "train", "test-loss": number / 8})
    (text,) = re.findall(
        r"```python.*\n(import pandas[^`]*Summary[^`]*)```", PAGE.read_text()
    )
    exec(text, {})
    assert sent == [("test-loss", 0.125, 1), ("test-loss", 0.25, 2)]
