"""The pages of the report in a real browser: Chromium, from the extra ``browser``."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.report.page import write_report
from fedbn_flwr.lab.runs.run import run
from tests.support import pictures
from tests.support.checkout import ROOT
from tests.support.runs import QUICK, edited

pytestmark = pytest.mark.skipif(
    find_spec("PyQt6") is None or find_spec("PyQt6.QtWebEngineWidgets") is None,
    reason="no browser: the extra `browser` installs one",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """A page with sites, a reference, missing sites, findings and settings."""
    parent = tmp_path_factory.mktemp("browser")
    base = {**QUICK, "num-clients": 4, "num-server-rounds": 3}
    base |= {"eval-on": "personal-own", "partition": "iid"}
    for strategy in ("standalone", "fedavg"):
        run(Config.make({**base, "strategy": strategy}), parent / strategy)
    folder, lost = parent / "fedavg", {"client 1": "no reply within 3 s, " * 9}
    edited(folder, "metrics.jsonl", lambda line: line.update(missing=lost))
    remedy = {"setting": "strategy=fixbn " * 5, "why": "a sentence " * 20}
    finding = {
        "what": "A fault",
        "evidence": ["a number"] * 3,
        "remedies": [remedy] * 2,
    }
    (folder / "doctor.json").write_text(json.dumps({"findings": [finding]}))
    with pictures.drawn():
        return write_report(folder)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 800, 1280])
def test_a_reader_sees_every_text_without_sideways_scrolling(
    page, width: int, scheme: str
) -> None:
    browser = ROOT / "docs/generate/browser.py"
    command = [sys.executable, str(browser), str(page), str(width), scheme]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["width"] in range(width - 20, width + 1)
    assert found["texts"] > 2000
    assert found["messages"] == []
    assert not found["sideways"]
    assert found["cut"] == []
    assert found["faint"] == []
