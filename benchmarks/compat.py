"""Run the core's tests with every Python that is here, the oldest and the newest Flower,
and torch 2.6, 2.8 and the newest; record what came of it.

    python benchmarks/compat.py                                        # the core's suite, nine sets of versions
    python benchmarks/compat.py --set 3.12/1.42/2.8 -- tests/norms     # some tests, one set
    python benchmarks/compat.py --set 3.11/nightly/newest              # tomorrow's Flower, which runs by name only

Each set has its own environment, `.compat/PYTHON-FLOWER-TORCH`. It is made, used and
deleted before the next one is made, since each holds some gigabytes; `--keep` leaves
them, and the next call uses them again. The versions are those of constraints.txt.
Where another Flower is asked for than the pinned one, the pins that fit one version of
Flower only are left out. The oldest Flower serves the core alone. The tests draw
pictures with the laboratory's packages, which want a newer one: what Flower asks for is
then overridden as named below. The nightly build is the package
flwr-nightly. It is installed in place of flwr, which is then not asked for at all.

The results go into docs/performance.md. A set that was run has a new row; the other
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
from itertools import product
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import typer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "performance.md"
PYTHONS = ("3.11", "3.12", "3.13")
NIGHTLY = "nightly"
FLOWERS = ("1.28", "1.41", "1.42", NIGHTLY)
NEWEST = "newest"
TORCHES = ("2.6", "2.8", NEWEST)
VERSIONS = [
    (python, *others)
    for python in PYTHONS
    for others in (
        ("1.28", "2.6"),
        ("1.42", "2.8"),
        ("1.42", NEWEST),
    )
]
BY_NAME = {"/".join(each): each for each in product(PYTHONS, FLOWERS, TORCHES)}
# packages whose pinned versions fit only some versions of Flower
BOUND_BY_FLOWER = ("cryptography", "flwr", "uv")
OVERRIDES = {"1.28": ("flwr", "rich")}
# An override whose marker is never true drops the requirement of flwr.
NO_FLWR = "flwr ; python_version < '0'"
# The bound must contain "dev", because only then builds before a release are allowed.
NEWEST_NIGHTLY = "flwr-nightly[simulation]>=1.43.0.dev0"
# packages that the core's tests need, without onnx of the extra dev, because onnx fits
# no old Flower
NEEDED = (
    f"{ROOT}[lab,privacy]",
    *("hypothesis", "pytest", "pytest-timeout", "pytest-xdist"),
)
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
CORE = (
    *(
        "batchnorm",
        "client",
        "compat",
        "doctor",
        "engines",
        "legacy",
        "messages",
        "norms",
    ),
    *("privacy", "server", "strategies", "training", "transport"),
    *("test_checked_file.py", "test_core_alone.py", "test_devices.py"),
    "test_errors.py",
)
SUITE = (*(f"tests/{name}" for name in CORE), "-n", "auto", "--dist", "loadgroup")
ROW = "| 3."
RULER = "|---" * 10 + "|"


class NotInstalledError(Exception):
    """The environment of a set cannot be made."""


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


def install(python: Path, flower: str, torch: str, environment: Path) -> None:
    """Make the environment with the package and what its tests need."""
    if not environment.exists():
        subprocess.run([python, "-m", "venv", environment], check=True)
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted, overrides = ["--editable", *NEEDED], [*OVERRIDES.get(flower, ())]
    if not any(pin.startswith(f"flwr=={flower}.") for pin in pins):
        pins = [pin for pin in pins if pin.partition("==")[0] not in BOUND_BY_FLOWER]
        if flower == NIGHTLY:
            wanted.append(NEWEST_NIGHTLY)
            overrides.append(NO_FLWR)
        else:
            pins.append(f"flwr=={flower}.*")
    if torch != NEWEST:
        pins.append(f"torch=={torch}.*")
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet"]
    command += ["--python", str(environment / "bin" / "python")]
    with tempfile.TemporaryDirectory() as folder:
        for option, lines in (("constraint", pins), ("override", overrides)):
            file = Path(folder, f"{option}.txt")
            file.write_text("\n".join(lines), encoding="utf-8")
            command += [f"--{option}", str(file)]
        done = subprocess.run(
            [*command, *wanted], capture_output=True, text=True, check=False
        )
    if done.returncode:
        print(done.stderr, file=sys.stderr, flush=True)
        raise NotInstalledError("its dependencies cannot be installed")


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


def tests_of(arguments: Sequence[str]) -> str:
    """Return the name of the chosen tests: the core's suite, or a part of it."""
    paths = {argument for argument in arguments if argument.startswith("tests/")}
    return "core" if paths.issuperset(SUITE[: len(CORE)]) else "part"


def versions_of(row: str) -> tuple[str, str, str]:
    """Return the set of versions that a row of the table is of."""
    python, flower, torch = (cell.strip() for cell in row.split("|")[1:4])
    if ".dev" in flower:
        flower = NIGHTLY
    if minor(torch) not in TORCHES:
        torch = NEWEST
    return minor(python), minor(flower), minor(torch)


def minor(version: str) -> str:
    """Return the first two numbers of a version."""
    return ".".join(version.split(".")[:2])


def record(row: str) -> None:
    """Put a row in the place of the set's former one."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines()
    rows = {versions_of(line): line for line in (*lines, row) if line.startswith(ROW)}
    others = [line for line in lines if not line.startswith(ROW)]
    place = others.index(RULER) + 1
    others[place:place] = [rows[each] for each in sorted(rows)]
    RESULTS.write_text("\n".join(others) + "\n", encoding="utf-8")


def main(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="arguments of pytest; default: the suite of the core"),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--set", help="PYTHON/FLOWER/TORCH; default: nine sets"),
    ] = None,
    keep: Annotated[bool, typer.Option(help="leave the environments")] = False,
) -> None:
    """Run the tests for every set, record each, and fail where one failed."""
    arguments = arguments or list(SUITE)
    names = names or ["/".join(each) for each in VERSIONS]
    if unknown := set(names) - set(BY_NAME):
        raise typer.BadParameter(
            f"{', '.join(sorted(unknown))}: sets are {', '.join(BY_NAME)}"
        )
    changed = said(
        "git", "status", "--porcelain", "--", ".", f":!{RESULTS.relative_to(ROOT)}"
    )
    commit = said("git", "rev-parse", "--short", "HEAD") + ("+" if changed else "")
    pythons, bad = interpreters(), []
    for name in names:
        version, flower, torch = BY_NAME[name]
        if version not in pythons:
            print(f"Python {version}: none found, so {name} is not run", flush=True)
            continue
        environment = ROOT / ".compat" / name.replace("/", "-")
        package = "flwr-nightly" if flower == NIGHTLY else "flwr"
        try:
            print(f"Python {version}, Flower {flower}, torch {torch}", flush=True)
            install(pythons[version], flower, torch, environment)
            found = versions(environment, (package, "torch"))
            code, numbers = tested(environment, arguments)
            cells = [*found, *numbers, tests_of(arguments)]
        except (NotInstalledError, subprocess.CalledProcessError) as error:
            code, cells = 1, [version, flower, torch, f"{error}", *[""] * 4]
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
