"""Each command that a page, an output or an error prints runs unchanged.

The folder has a space and an apostrophe in its name.
"""

from __future__ import annotations

import html
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from fedbn_flwr.lab.data import load_dataset
from fedbn_flwr.lab.results.checkpoint import after_interrupt
from fedbn_flwr.lab.studies.sweep import check_data
from tests.support.commands import call, output_of

COMMAND = re.compile(r"fedbn-flwr (?:run|sweep|report|doctor|evaluate|cal)[^`<\n\[;]*")
TINY = {"num-clients": 2, "num-server-rounds": 1, "local-steps": 1, "device": "cpu"}
TINY |= {"batch-size": 8, "strategy": "fedbn", "eval-on": "personal-own,averaged-bn"}
STUDY = """
name: a study
base: {num-clients: 2, num-server-rounds: 1, local-steps: 1, batch-size: 8, device: cpu}
methods: {FedAvg: {strategy: fedavg}, FedBN: {strategy: fedbn}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a run, its report, a study and a calibrated model."""
    folder = tmp_path_factory.mktemp("printed") / "anna's runs"
    settings = [
        word for key, value in TINY.items() for word in ("--set", f"{key}={value}")
    ]
    first = output_of("run", *settings, "--workers", 0, "--out", folder / "run")
    (folder / "first.txt").write_text(first)
    output_of("report", folder / "run")
    (folder / "my.yaml").write_text(STUDY)
    swept = output_of("sweep", folder / "my.yaml", "--out", folder / "study")
    (folder / "swept.txt").write_text(swept)
    output_of("report", folder / "study")
    (folder / "images").mkdir()
    for number, image in enumerate(load_dataset("digits").test.inputs[:20]):
        Image.fromarray(image[0].byte().numpy()).save(folder / f"images/{number}.png")
    words = ("--dataset", f"folder:{folder / 'images'}", "--out", folder / "new")
    output_of("calibrate", folder / "run", *words)
    return folder


def unfinished(folder: Path) -> str:
    shutil.copytree(folder / "run", folder / "cut")
    (folder / "cut/summary.json").unlink()
    return call("evaluate", folder / "cut", "--dataset", "digits").output


def interrupted(folder: Path) -> str:
    return after_interrupt(folder / "run", " --workers 0")


PLACES = {
    "the end of a run": lambda folder: (folder / "first.txt").read_text(),
    "the page of a run": lambda folder: (folder / "run/report.html").read_text(),
    "the end of a study": lambda folder: (folder / "swept.txt").read_text(),
    "the page of a study": lambda folder: (folder / "study/report.html").read_text(),
    "a calibration": lambda folder: (folder / "new/calibration.html").read_text(),
    "an unfinished run": unfinished,
    "an interrupted run": interrupted,
}


def printed(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in a text, with data for its placeholders."""
    for found in dict.fromkeys(COMMAND.findall(html.unescape(text))):
        words = shlex.split(found.strip().rstrip("."))[1:]
        yield [{"RUN2": "run", "LABELLED": "digits-domains"}.get(w, w) for w in words]


@pytest.mark.parametrize("place", PLACES)
def test_each_printed_command_runs(place: str, folder: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    text = PLACES[place](folder)

    def checked(study, *_) -> None:
        check_data([*study.cells()])

    found = [*printed(text)]
    assert found
    for words in found:
        with monkeypatch.context() as patched:
            # The study of many methods takes minutes, so stop it before its first run.
            patched.setattr("fedbn_flwr.lab.studies.sweep.sweep", checked)
            ended = call(*words)
        assert ended.exit_code == 0, (words, ended.output)
