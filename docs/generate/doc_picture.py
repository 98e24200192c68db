"""The picture of a report for the pages, if a browser is installed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.report.page import write_report
from fedbn_flwr.lab.runs.run import run

PICTURE = Path("docs/images/report.png")
_RUN = {
    "strategy": "fedbn",
    "num-clients": 5,
    "partition": "iid",
    "eval-on": "personal-own",
    "num-server-rounds": 20,
    "local-steps": 5,
    "batch-size": 16,
    "eval-every": 2,
}
"""A federation on digits that trains in seconds; ``docs/get-started.md`` names it."""


def draw_report(root: Path) -> bool:
    """Write the picture, and return whether there is a browser to do so.

    Its pixels depend on the browser and its fonts, so no check compares them.
    """
    if find_spec("PyQt6") is None or find_spec("PyQt6.QtWebEngineWidgets") is None:
        return False
    root = root.absolute()
    # The page shows paths, so the folder of the runs has a name that suits a reader.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        run(Config.make(_RUN), Path("runs/fedbn"))
        page = write_report(Path("runs/fedbn")).absolute()
        browser = Path(__file__).absolute().with_name("browser.py")
        shot = str(Path(folder, "page.png"))
        command = [sys.executable, str(browser), str(page), "1180", "light", shot]
        subprocess.run(command, check=True, capture_output=True)
        # Cut off the scroll bar, and reduce the colours to make the file small.
        with Image.open(shot) as image:
            page_only = image.convert("RGB").crop((0, 0, 1165, image.height))
            page_only.quantize(64).save(root / PICTURE, optimize=True)
    return True
