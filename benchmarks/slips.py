"""Make one slip at a time in a copy of the code, run the tests that should notice, and
say killed or survived.

    python benchmarks/slips.py              # all slips of slips.yaml
    python benchmarks/slips.py -k fbn       # those whose name has "fbn"

A slip replaces one text by another: a dropped line, a wrong default, a negated
condition, a forgotten reset. Its old text is looked up in all files of its folder,
because code moves. Exactly one place must have it; else the slip is reported as not
found or ambiguous, and its text must be brought up to date. The tests are first run
without a slip.

Each run of tests is a fork of this process, which has imported torch and Flower once
and nothing of the package.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}

import flwr.clientapp
import flwr.serverapp  # noqa: F401
import pytest
import torch
import torchvision.models  # noqa: F401
import typer
import yaml

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("slips.yaml")
COPIED = (
    "fedbn_flwr",
    "tests",
    "apps",
    "benchmarks",
    "docker",
    "docs",
    "studies",
    "pyproject.toml",
)
TIMEOUT = 600.0  # seconds, because a slip may make a test wait forever
GREEN, RED = 0, 1  # exit statuses of pytest; any other means that no test ran


class NotUniqueError(Exception):
    """The old text of a slip is in no file, or in several places."""


@dataclass(frozen=True)
class Slip:
    """A fault of a line.

    Attributes:
        name: the name in the report.
        folder: where the old text is looked up, a folder or a file.
        old: the text to replace; its lines are indented as in the file.
        new: the text in its place.
        tests: arguments of pytest.
    """

    name: str
    folder: str
    old: str
    new: str
    tests: str

    def place(self, root: Path) -> tuple[Path, str]:
        """Return the file that has the old text, and the file's text.

        Raises:
            NotUniqueError: the old text is not in exactly one place.
        """
        files = sorted((root / self.folder).rglob("*.py")) or [root / self.folder]
        texts = {
            file: file.read_text(encoding="utf-8") for file in files if file.is_file()
        }
        count = sum(text.count(self.old) for text in texts.values())
        if count != 1:
            raise NotUniqueError(
                "not found" if count == 0 else f"ambiguous: {count} places"
            )
        return next((file, text) for file, text in texts.items() if self.old in text)

    @contextmanager
    def made(self, root: Path) -> Iterator[None]:
        """Make the slip in the block; NotUniqueError as in ``place``."""
        file, text = self.place(root)
        file.write_text(text.replace(self.old, self.new), encoding="utf-8")
        try:
            yield
        finally:
            file.write_text(text, encoding="utf-8")


def read_slips(words: str = "") -> list[Slip]:
    """Return the slips of the list whose name has these words."""
    entries = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    slips = [
        Slip(**{**entry, "old": _text(entry["old"]), "new": _text(entry["new"])})
        for entry in entries
    ]
    return [slip for slip in slips if words in slip.name]


def _text(text: str) -> str:
    """Return a text of the list without the line feed that ends a block."""
    return text.rstrip("\n")


def run_tests(root: Path, tests: str) -> tuple[int, str]:
    """Return pytest's exit status, and the end of what it printed."""
    printed = root / "printed.txt"
    process = multiprocessing.get_context("fork").Process(
        target=_run_pytest, args=(root, tests, printed)
    )
    process.start()
    process.join(TIMEOUT)
    if process.is_alive():
        process.kill()
        process.join()
        return RED, f"no end within {TIMEOUT:g} s"
    return (
        process.exitcode or GREEN,
        printed.read_text(encoding="utf-8", errors="replace")[-2000:],
    )


def _run_pytest(root: Path, tests: str, printed: Path) -> None:
    with printed.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.chdir(root)
    sys.path.insert(0, str(root))
    sys.dont_write_bytecode = True
    os.environ["PYTHONPATH"] = str(root)  # for processes that tests start
    sys.exit(
        int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *shlex.split(tests)]))
    )


def judged(slip: Slip, root: Path) -> str:
    """Return what became of a slip, in words."""
    try:
        with slip.made(root):
            status, said = run_tests(root, slip.tests)
    except NotUniqueError as error:
        return str(error)
    if status not in (GREEN, RED):
        return (
            "no verdict, pytest ended with status"
            f" {status}:\n{textwrap.indent(said, '    ')}"
        )
    return "killed" if status == RED else "survived"


def main(
    words: Annotated[
        str, typer.Option("-k", help="Slips whose name has these words.")
    ] = "",
    check: Annotated[
        bool, typer.Option(help="Run the tests without a slip first.")
    ] = True,
) -> None:
    """Make the slips one after the other; the exit status is 1 unless the tests notice
    all of them.
    """
    torch.set_num_threads(1)  # because threads do not survive a fork
    slips = read_slips(words)
    with tempfile.TemporaryDirectory(prefix="slips-") as folder:
        root = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(
                    source,
                    root / name,
                    symlinks=True,
                    ignore=shutil.ignore_patterns("__pycache__"),
                )
            else:
                shutil.copy(source, root)
        for tests in dict.fromkeys(slip.tests for slip in slips) if check else ():
            status, said = run_tests(root, tests)
            if status != GREEN:
                raise typer.BadParameter(
                    f"the tests fail without a slip: {tests}\n{said}"
                )
        verdicts = []
        for slip in slips:
            verdicts.append(judged(slip, root))
            typer.echo(f"{slip.name}: {verdicts[-1]}")
    killed = verdicts.count("killed")
    typer.echo(f"{killed} of {len(slips)} killed")
    raise typer.Exit(killed != len(slips))


if __name__ == "__main__":
    typer.run(main)
