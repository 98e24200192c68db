"""How much of the package a reader holds: names in a method's file, files of a run.

    python benchmarks/reading.py --package ../before --package . --json reading.json

Each ``--package`` is a checkout, by default this one; this Python has what they import.

- names: what a method's file imports from the package.
- overrides: the methods and attributes of ``Method`` that the classes there define.
- a round, before round 1: the files and functions that ``reading_trace.py`` sees.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from measure import ROOT, commit, number, table

NAMED = ("fedbn", "fedprox", "fixbn", "fedtan", "hbn")
TRACED = ("fedavg", "fixbn", "fedtan")
TABLES = {"name", "summary_line", "source"}  # fields that every method has
Figures = dict[str, float]


def imported(file: Path) -> set[str]:
    """Return the names that a file imports from the package, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        if f"{node.module}.".startswith("fedbn_flwr."):
            names.update(alias.name for alias in node.names)
    return names


def defined(kind: ast.ClassDef) -> set[str]:
    """Return the names that a class body defines, without dunders."""
    names: set[str] = set()
    for statement in kind.body:
        if isinstance(statement, ast.FunctionDef):
            names.add(statement.name)
        elif isinstance(statement, ast.AnnAssign):
            names.add(ast.unparse(statement.target))
        elif isinstance(statement, ast.Assign):
            names.update(ast.unparse(target) for target in statement.targets)
    return {name for name in names if not name.startswith("__")}


def overrides(root: Path, file: Path) -> set[str]:
    """Return what of ``Method`` the classes of a method's file define anew."""
    interface: set[str] = set()
    method = next((root / "fedbn_flwr/server").rglob("method.py"))
    for node in ast.parse(method.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == "Method":
            interface = defined(node) - TABLES
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef) and "Method" in node.name:
            found |= defined(node) & interface
    return found


def entered(root: Path, method: str) -> dict[str, list[str]]:
    """Return what a run of a checkout enters, in a fresh Python."""
    environment = os.environ | {"PYTHONPATH": str(root), "FLWR_TELEMETRY_ENABLED": "0"}
    printed = subprocess.check_output(
        [sys.executable, str(ROOT / "benchmarks/reading_trace.py"), method],
        env=environment,
        cwd=root,
        text=True,
    )
    answer: dict[str, list[str]] = json.loads(printed.splitlines()[-1])
    return answer


def figures_of(root: Path) -> Figures:
    """Return all figures of a checkout."""
    found: Figures = {}
    for method in NAMED:
        file = root / f"fedbn_flwr/strategies/{method}.py"
        found[f"{method}: names"] = len(imported(file))
        found[f"{method}: overrides"] = len(overrides(root, file))
    for method in TRACED:
        parts = entered(root, method)
        # Count the parts before round 1 only for fedavg, because they hardly depend on
        # the method.
        wanted = parts if method == "fedavg" else ["a round"]
        for part in wanted:
            files = {place.partition(":")[0] for place in parts[part]}
            found[f"{method}, {part}: files"] = len(files)
            found[f"{method}, {part}: functions"] = len(parts[part])
    return found


def main(
    package: Annotated[
        list[Path] | None, typer.Option(help="A checkout. Default: this one.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures here.")
    ] = None,
) -> None:
    """Print the table, a column for each checkout."""
    columns: dict[str, Figures] = {}
    for root in [path.resolve() for path in package or [ROOT]]:
        columns[f"{root.name} {commit(root)}".strip()] = figures_of(root)
    rows = []
    for name in next(iter(columns.values())):
        values = [number(column[name], 0) for column in columns.values()]
        rows.append([name, *values])
    print(table(["", *columns], rows))
    if json_file:
        json_file.write_text(json.dumps(columns, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
