"""Which planted mistakes does the test suite find? Many slips cost one run of the suite.

    python benchmarks/slips.py slips.json
    python benchmarks/slips.py slips.json -- tests/server tests/reference

The file is a list of slips, each with a name (``id``), a file (``file``), and the text
before and after (``old``, ``new``). All slips are planted in one clone of the last
commit, and the suite runs once in it. Then each slip is planted alone, and only the tests
that failed are run, until one fails again. A slip for which none fails has survived.

Whoever writes slips should not have seen the tests, and should draw the places.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider")
AT_ONCE = ("-n", "auto", "--dist", "loadgroup", "-rfE")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)


def plant(folder: Path, slip: dict[str, Any]) -> bool:
    """Plant a slip, and return whether its old text is there exactly once."""
    path = folder / slip["file"]
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text.count(slip["old"]) != 1:
        return False
    path.write_text(text.replace(slip["old"], slip["new"]), encoding="utf-8")
    return True


def failing(folder: Path, *args: str) -> list[str]:
    """Return the tests of a clone that fail."""
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        (*PYTEST, *args), cwd=folder, env=env, capture_output=True, text=True
    )
    if run.returncode not in (0, 1, 2):
        raise SystemExit(run.stdout[-2000:] + run.stderr[-2000:])
    return list(dict.fromkeys(FAILED.findall(run.stdout)))


def first_killer(folder: Path, slip: dict[str, Any], tests: list[str]) -> str:
    """Return the first test that fails with only this slip, the nearest first, or ""."""
    room = Path(slip["file"]).parts[1:-1]
    near = sorted(tests, key=lambda test: Path(*room).as_posix() not in test)
    plant(folder, slip)
    killers = failing(folder, "-x", "-rfE", *near)
    subprocess.run(("git", "checkout", "-q", "."), cwd=folder, check=True)
    return killers[0] if killers else ""


def main(
    slips: Annotated[Path, typer.Argument(help="The JSON file of the slips.")],
    tests: Annotated[
        list[str] | None, typer.Argument(help="Tests; all if omitted.")
    ] = None,
) -> None:
    """Plant slips, and print which test finds each of them."""
    listed = json.loads(slips.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "clone"
        subprocess.run(("git", "clone", "-q", str(ROOT), str(folder)), check=True)
        planted = [slip for slip in listed if plant(folder, slip)]
        found = failing(folder, *AT_ONCE, *(tests or ()))
        subprocess.run(("git", "checkout", "-q", "."), cwd=folder, check=True)
        without = failing(folder, *AT_ONCE, *found) if found else []
        found = [test for test in found if test not in without]
        print(f"{len(planted)} slips planted at once: {len(found)} tests fail")
        killed = 0
        for slip in listed:
            killer = "its text is not there once"
            if slip in planted:
                killer = first_killer(folder, slip, found) if found else ""
                killed += bool(killer)
            print(f"{slip['id']}: {killer or 'SURVIVED'}", flush=True)
    print(f"killed {killed} of {len(planted)}")


if __name__ == "__main__":
    typer.run(main)
