"""``fedbn-flwr report``: one HTML page of a run or a study, in one file that loads nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.files import STUDY_FILE, refuse_no_results
from fedbn_flwr.lab.output.folder import is_locked
from fedbn_flwr.lab.report.files import RunFiles, StudyFiles
from fedbn_flwr.lab.report.page import GENERATOR, Page
from fedbn_flwr.lab.report.run import run_page
from fedbn_flwr.lab.report.study import study_page

__all__ = ["REPORT_FILE", "follow_report", "write_report"]

REPORT_FILE = "report.html"
_INTERVAL = 5  # seconds between two looks at a running folder, and after which an open page is loaded again
_SHARE = 10  # times the seconds that the last page took, if these are more: the cores are for the runs


def write_report(folder: Path, out: Path | None = None, *, plain: bool = False) -> Path:
    """Write the report of a run or a study as it is now; return the file.

    Args:
        folder: the folder of a run or a study, finished or not.
        out: the file; None = ``report.html`` in the folder. An older report is replaced.
        plain: plotly's code is in it as it is, 1.5 MB, for browsers that cannot unpack it.

    Raises:
        ConfigError: the folder is neither, the file is not a report, or it cannot be written.
    """
    return _write(folder, _target(folder, out), live=0, plain=plain)[0]


def follow_report(
    folder: Path, out: Path | None = None, *, plain: bool = False, wait: Callable[[float], None] = time.sleep
) -> Path:
    """Write the report whenever the folder has changed, until its run or study is finished; return the file.

    A study is finished where every run is finished or failed, and no sweep goes on.

    While it is followed, the page in an open browser loads itself again. Ctrl-C ends with a page that does not.

    Args:
        folder: as for ``write_report``.
        out: as for ``write_report``.
        plain: as for ``write_report``.
        wait: sleeps so many seconds.

    Raises:
        ConfigError: as for ``write_report``.
    """
    target, shown, finished, seconds = _target(folder, out), None, False, 0.0
    try:
        while True:
            state = _state(folder)
            if state != shown:
                begun = time.monotonic()
                _, finished = _write(folder, target, live=_INTERVAL, plain=plain)
                shown, seconds = state, time.monotonic() - begun
            if finished and not is_locked(folder):  # a sweep may repeat what has failed
                break
            wait(max(_INTERVAL, _SHARE * seconds))
    finally:
        _write(folder, target, live=0, plain=plain)
    return target


def _write(folder: Path, target: Path, live: int, plain: bool) -> tuple[Path, bool]:
    """Write the page; return its file and whether the run or study is finished."""
    foot = f"Made by fedbn-flwr {version('fedbn-flwr')} on {datetime.now():%Y-%m-%d at %H:%M:%S}."
    page, finished = _page(folder, foot, live)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, page.html(plain))
    except OSError as error:
        raise ConfigError(f"out={str(target)!r} cannot be written: {error}") from error
    return target, finished


def _page(folder: Path, foot: str, live: int) -> tuple[Page, bool]:
    if (folder / STUDY_FILE).is_file():
        study = StudyFiles.read(folder)
        return study_page(study, foot, live), study.ended
    refuse_no_results(folder)
    run = RunFiles.read(folder)
    return run_page(run, foot, live), bool(run.summary)


def _target(folder: Path, out: Path | None) -> Path:
    """Return the file to write: a new one, or an older report."""
    target = out or folder / REPORT_FILE
    if target.is_dir():
        raise ConfigError(f"out={str(target)!r} is a folder. Give the name of a file, such as {target / REPORT_FILE}.")
    if target.is_file() and GENERATOR.encode() not in target.read_bytes()[:1000]:
        raise ConfigError(f"out={str(target)!r} is there and is not a report. Choose another file.")
    return target


def _state(folder: Path) -> list[tuple[str, int, int]]:
    """Return what tells that a folder has changed: times and sizes of its text files, those of its runs included."""
    state = []
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            with suppress(OSError):  # a temporary file, renamed since; os.walk passes over a folder that is
                if name.endswith((".json", ".jsonl")):
                    about = os.stat(path)
                    state.append((path, about.st_mtime_ns, about.st_size))
    return sorted(state)
