"""Takes the screenshots of ``report.md``: ``python docs/screenshots.py``; needs Chromium and the extra ``dev``.

The study is five domains of scikit-learn's digits, a client each: it runs anywhere, in minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parent / "images"
STUDY: dict[str, Any] = {
    "name": "Five domains of digits",
    "base": {
        **{"dataset": "digits-domains", "partition": "domain", "num-clients": 5, "model": "lenet"},
        **{"num-server-rounds": 12, "learning-rate": 0.05, "batch-size": 16},
    },
    "methods": {
        "FedAvg": {"strategy": "fedavg", "eval-on": "personal-own"},
        "FedBN": {"strategy": "fedbn"},
        "SiloBN": {"strategy": "silobn"},
        "FedAvg+GN": {"strategy": "fedavg", "norm": "group", "eval-on": "personal-own"},
    },
    "seeds": [0, 1, 2],
    "target": 60,
}
PICTURES: tuple[tuple[str, str, str, dict[str, Any], str], ...] = (  # file, folder, section, page, media
    ("report-study", "", "", {"viewport": {"width": 1060, "height": 1900}, "color_scheme": "light"}, "screen"),
    ("report-domains", "", "domains", {"viewport": {"width": 1060, "height": 900}, "color_scheme": "light"}, "screen"),
    ("report-split", "", "split", {"viewport": {"width": 1060, "height": 900}, "color_scheme": "light"}, "screen"),
    (
        "report-batchnorm",
        "FedAvg/all/seed-0",
        "batchnorm",
        {"viewport": {"width": 1060, "height": 900}, "color_scheme": "dark"},
        "screen",
    ),
    ("report-phone", "", "", {"viewport": {"width": 390, "height": 770}, "color_scheme": "light"}, "screen"),
    ("report-print", "", "curves", {"viewport": {"width": 794, "height": 1123}, "color_scheme": "dark"}, "print"),
)


def main() -> None:
    """Run the study, write the reports, and take the pictures."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no Chromium on PATH")
    with tempfile.TemporaryDirectory() as work, sync_playwright() as playwright:
        study = Path(work) / "study.yaml"
        study.write_text(yaml.safe_dump(STUDY, sort_keys=False))
        out = Path(work) / "runs/domains"
        _call("sweep", str(study), "--out", str(out))
        browser = playwright.chromium.launch(executable_path=chromium)
        for name, folder, section, options, media in PICTURES:
            page = Path(work) / f"{name}.html"
            _call("report", str(out / folder), "--out", str(page))
            tab = browser.new_page(**options)
            tab.emulate_media(media=media, color_scheme=options["color_scheme"])
            tab.goto(page.as_uri())
            tab.wait_for_function("[...document.querySelectorAll('.plot')].every((one) => one.querySelector('.xtick'))")
            place = tab.locator(f"section#{section}") if section else tab
            place.screenshot(path=IMAGES / f"{name}.png")
            print(IMAGES / f"{name}.png")
        browser.close()


def _call(*words: str) -> None:
    subprocess.run([Path(sys.executable).parent / "fedbn-flwr", *words], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
