"""Run the tests with every Python that is here and the oldest and the newest Flower;
record what came of it.

    python benchmarks/compat.py                                    # the whole suite, every pair (Python, Flower)
    python benchmarks/compat.py --pair 3.12/1.42 -- tests/norms    # some tests, one pair
    python benchmarks/compat.py --pair 3.11/nightly                # with tomorrow's Flower, which runs by name only

Each pair has its own environment, `.compat/PYTHON-FLOWER`. It is made, used and deleted
before the next one is made, since each holds some gigabytes; `--keep` leaves them, and
the next call uses them again. The versions are those of constraints.txt. Where another
Flower is asked for than the pinned one, the pins that fit one version of Flower only
are left out. A Flower whose own dependencies cannot be had is installed with the
overrides named below; the table says so. The nightly build is the package flwr-nightly.
It is installed in place of flwr, which is then not asked for at all.

The results go into docs/results/compat.md. A pair that was run has a new row; the other
lines of the file stay.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import typer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "compat.md"
PYTHONS = ("3.11", "3.12", "3.13")
FLOWERS = ("1.41", "1.42")
NIGHTLY = "nightly"
PAIRS = [(python, flower) for python in PYTHONS for flower in FLOWERS]
BY_NAME = {
    f"{python}/{flower}": (python, flower)
    for python in PYTHONS
    for flower in (*FLOWERS, NIGHTLY)
}
BOUND_BY_FLOWER = ("flwr", "uv")  # their pins fit one version of Flower
OVERRIDES = {"1.42": ("certifi",)}  # asks for one newer than every release at its own
# an override whose marker never holds: the requirement is dropped
NO_FLWR = "flwr ; python_version < '0'"
# a bound with "dev" is what admits builds before a release
NEWEST_NIGHTLY = "flwr-nightly[simulation]>=1.43.0.dev0"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
SUITE = ("-n", "auto", "--dist", "loadgroup")
ROW = "| 3."
RULER = "|---" * 11 + "|"
HEAD = f"""# Python and Flower

`make compat` makes this table: the tests with each Python that is there and the oldest and the newest supported Flower.
A commit with a `+` had changes that were not committed. An override is a dependency of Flower that was installed in
another version than Flower asks for.

| Python | Flower | torch | passed | failed | skipped | seconds | arguments | overrides | date | commit |
{RULER}
"""


class NotInstalledError(Exception):
    """The environment of a pair cannot be made."""


def said(*command: str | Path) -> str:
    """Return what a command prints, nothing where it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=ROOT
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def interpreters() -> dict[str, Path]:
    """Return the Python of each supported version that runs: that of the PATH, or the
    newest that pyenv has.
    """
    found = {}
    pyenv = Path(said("pyenv", "root") or "/nonexistent") / "versions"
    for version in PYTHONS:
        kept = sorted(
            pyenv.glob(f"{version}.*/bin/python"),
            key=lambda path: (len(str(path)), path),
            reverse=True,
        )
        for python in (Path(f"python{version}"), *kept):
            path = said(
                python,
                "-c",
                "import sys; print(sys.executable, '%d.%d' % sys.version_info[:2])",
            ).split()
            if path[1:] == [version]:
                found[version] = Path(path[0])
                break
    return found


def install(python: Path, flower: str, environment: Path) -> tuple[str, ...]:
    """Make the environment with the package and what its tests need; return which
    overrides it took.
    """
    if not environment.exists():
        subprocess.run([python, "-m", "venv", environment], check=True)
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted, dropped = ["--editable", f"{ROOT}[lab,dev]"], ""
    if not any(pin.startswith(f"flwr=={flower}.") for pin in pins):
        pins = [pin for pin in pins if pin.partition("==")[0] not in BOUND_BY_FLOWER]
        if flower == NIGHTLY:
            wanted, dropped = [*wanted, NEWEST_NIGHTLY], NO_FLWR
        else:
            pins.append(f"flwr=={flower}.*")
    with tempfile.TemporaryDirectory() as folder:
        constraints, overrides = (
            Path(folder, "constraints.txt"),
            Path(folder, "overrides.txt"),
        )
        constraints.write_text("\n".join(pins), encoding="utf-8")
        for override in dict.fromkeys([(), OVERRIDES.get(flower, ())]):
            overrides.write_text("\n".join([dropped, *override]), encoding="utf-8")
            command = [sys.executable, "-m", "uv", "pip", "install", "--quiet"]
            command += ["--python", str(environment / "bin" / "python")]
            command += [
                "--constraint",
                str(constraints),
                "--override",
                str(overrides),
                *wanted,
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return override
    print(done.stderr, file=sys.stderr, flush=True)
    raise NotInstalledError("its dependencies cannot be had")


def versions(environment: Path, names: Sequence[str]) -> list[str]:
    """Return the versions that the environment has of Python and of some distributions."""
    code = (
        "import platform, sys; from importlib.metadata import version;"
        " print(platform.python_version()); "
    )
    code += "print(*map(version, sys.argv[1:]), sep='\\n')"
    return said(environment / "bin" / "python", "-c", code, *names).split()


def tested(environment: Path, arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Run the tests; return pytest's exit code and the numbers passed, failed and
    skipped, and the seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            str(environment / "bin" / "python"),
            "-m",
            "pytest",
            f"--junit-xml={report}",
            *arguments,
        ]
        code = subprocess.run(
            command, check=False, cwd=ROOT, env={**os.environ, **QUIET}
        ).returncode
        if not report.exists():
            return code, ["-", f"pytest ended with {code}", "-", "-"]
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    count = {
        kind: sum(int(suite.get(kind, "0")) for suite in suites)
        for kind in ("tests", "failures", "skipped")
    }
    failed = count["failures"] + sum(int(suite.get("errors", "0")) for suite in suites)
    seconds = sum(float(suite.get("time", "0")) for suite in suites)
    passed = count["tests"] - failed - count["skipped"]
    bad = f"pytest ended with {code}" if code and not failed else str(failed)
    return code, [str(passed), bad, str(count["skipped"]), f"{seconds:.0f}"]


def pair_of(row: str) -> tuple[str, str]:
    """Return the minor versions of Python and of Flower that a row of the table is of."""
    python, flower = (cell.strip() for cell in row.split("|")[1:3])
    return minor(python), NIGHTLY if ".dev" in flower else minor(flower)


def minor(version: str) -> str:
    """Return the first two numbers of a version."""
    return ".".join(version.split(".")[:2])


def record(row: str) -> None:
    """Put a row in the place of the pair's former one. A pair that was never run has a
    row that says so.
    """
    lines = (
        RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else HEAD
    ).splitlines()
    rows = {
        (python, flower): f"| {python} | {flower} | not run |{'  |' * 8}"
        for python, flower in PAIRS
    }
    rows |= {pair_of(line): line for line in (*lines, row) if line.startswith(ROW)}
    others = [line for line in lines if not line.startswith(ROW)]
    place = others.index(RULER) + 1
    others[place:place] = [rows[pair] for pair in sorted(rows)]
    RESULTS.write_text("\n".join(others) + "\n", encoding="utf-8")


def main(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="for pytest; without them the whole suite"),
    ] = None,
    pair: Annotated[
        list[str] | None, typer.Option(help="PYTHON/FLOWER; without it every pair")
    ] = None,
    keep: Annotated[bool, typer.Option(help="leave the environments")] = False,
) -> None:
    """Run the tests for every pair, record each, and fail where one failed."""
    arguments = arguments or list(SUITE)
    if unknown := set(pair or ()) - set(BY_NAME):
        raise typer.BadParameter(
            f"{', '.join(sorted(unknown))}: pairs are {', '.join(BY_NAME)}"
        )
    changed = said(
        "git", "status", "--porcelain", "--", ".", f":!{RESULTS.relative_to(ROOT)}"
    )
    commit = said("git", "rev-parse", "--short", "HEAD") + ("+" if changed else "")
    pythons, bad = interpreters(), []
    for name in pair or [f"{python}/{flower}" for python, flower in PAIRS]:
        version, flower = BY_NAME[name]
        if version not in pythons:
            print(f"Python {version}: none found, so {name} is not run", flush=True)
            continue
        environment = ROOT / ".compat" / f"{version}-{flower}"
        package = "flwr-nightly" if flower == NIGHTLY else "flwr"
        try:
            print(f"Python {version}, Flower {flower}", flush=True)
            overrides = install(pythons[version], flower, environment)
            python, installed, torch, *other = versions(
                environment, (package, "torch", *overrides)
            )
            code, numbers = tested(environment, arguments)
            named = ", ".join(
                f"{which} {number}"
                for which, number in zip(overrides, other, strict=True)
            )
            cells = [
                python,
                installed,
                torch,
                *numbers,
                f"`{' '.join(arguments)}`",
                named,
            ]
        except (NotInstalledError, subprocess.CalledProcessError) as error:
            code, cells = 1, [version, flower, f"not installed: {error}", *[""] * 6]
        finally:
            if not keep:
                shutil.rmtree(environment, ignore_errors=True)
        record(f"| {' | '.join([*cells, str(date.today()), commit])} |")
        if code:
            bad.append(name)
    if bad:
        raise SystemExit(f"Failed: {', '.join(bad)}")


if __name__ == "__main__":
    typer.run(main)
