"""How the code reads: names to hold in mind, files a round enters, dense lines,
imports, sizes.

    python benchmarks/reading.py --package ../before --package . --json reading.json

Each ``--package`` is a checkout, by default this one; this Python has what they import.

Names for a method: the distinct names of the package's interface in the method's file,
but for ``name``, ``summary_line`` and ``source``, which every method has, and dunders.
What a file inherits and does not mention is free. A server class inherits from
``Method`` or ``Strategy``.

- defined: what its server classes define, and an inherited class of another file has,
  too.
- imported: from ``fedbn_flwr.server``; given: the keywords in calls of that.
- reached: other inherited attributes, of ``self``, ``cls``, ``super()`` or ``other``;
  and those of what the interface hands over, as ``run.parts`` (``HANDED``).

Code lines are neither blank, nor a comment alone, nor of a docstring; comment lines
have nothing else. A function is as long as its code with the signature. A star group is
``*(...)`` in a call or a list. Imports are medians of five processes; a loaded machine
moves CPU seconds less than seconds. The lab is ``fedbn_flwr/lab``, or what goes there.
Files of a round: see ``reading_trace.py``.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import os
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import ROOT, commit, number, table

METHODS = ("fedbn", "fedprox", "fixbn", "fedtan")
INTERFACE = {"Method", "Strategy"}
HANDED = {"run", "facts", "reply", "replies"}
EVERY_METHOD = {"name", "summary_line", "source"}
LAB = ("data", "models", "experiment", "export", "deployment", "cli")
DENSE: dict[str, tuple[type[ast.AST], ...]] = {
    "comprehensions": (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
    "conditional expressions": (ast.IfExp,),
    "walruses": (ast.NamedExpr,),
}

IMPORT = """import json, sys, time
before, start, cpu = set(sys.modules), time.perf_counter(), time.process_time()
import {}
seconds = time.perf_counter() - start, time.process_time() - cpu
print(json.dumps([len(sys.modules.keys() - before), *seconds]))
"""
BLANK = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
Figures = dict[str, float]


class Source:
    """A file: its nodes, its classes, the modules of its imports, its lines of code and
    of comments.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text()
        self.lines = text.splitlines()
        self.nodes = list(ast.walk(ast.parse(text)))
        self.classes: dict[str, ast.ClassDef] = {}
        self.imports: dict[str, str] = {}
        self.code: set[int] = set()
        comments: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                comments.add(token.start[0])
            elif token.type not in BLANK:
                self.code.update(range(token.start[0], token.end[0] + 1))
        for node in self.nodes:
            if isinstance(node, ast.Expr) and isinstance(
                getattr(node.value, "value", None), str
            ):
                self.code.difference_update(_lines_of(node))
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = node.module or ""
        self.comments = comments - self.code

    def count(self, *kinds: type[ast.AST]) -> int:
        return sum(isinstance(node, kinds) for node in self.nodes)


def _lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


source = functools.cache(Source)


def bases(root: Path, file: Path, name: str) -> Iterator[tuple[Path, ast.ClassDef]]:
    """Yield the class that a file calls so, and its bases in the package, each with its
    file.
    """
    seen = source(file)
    if name in seen.classes:
        yield file, seen.classes[name]
        for base in seen.classes[name].bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            yield from bases(root, file, ast.unparse(plain))
    elif seen.imports.get(name, "").startswith("fedbn_flwr."):
        module = root.joinpath(*seen.imports[name].split("."))
        path = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
        yield from bases(root, path, name)


def members(kind: ast.ClassDef) -> set[str]:
    """Return the names that a class body defines, without dunders."""
    names: set[str] = set()
    for statement in kind.body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            names.add(statement.name)
        elif isinstance(statement, ast.AnnAssign):
            names.add(ast.unparse(statement.target))
        elif isinstance(statement, ast.Assign):
            names.update(ast.unparse(target) for target in statement.targets)
    return {name for name in names if not name.startswith("__")}


def names_for(root: Path, file: Path) -> dict[str, set[str]]:
    """Return the names of the interface in a method's file, by kind."""
    imports = source(file).imports.items()
    imported = {
        name
        for name, module in imports
        if f"{module}.".startswith("fedbn_flwr.server.")
    }
    names = {
        "defined": set[str](),
        "imported": imported,
        "given": set[str](),
        "reached": set[str](),
    }
    for node in source(file).nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in imported:
            names["given"].update(
                keyword.arg for keyword in node.keywords if keyword.arg
            )
    for name, kind in source(file).classes.items():
        above = list(bases(root, file, name))
        if any(base.name in INTERFACE for _, base in above):
            elsewhere = [members(base) for path, base in above if path != file]
            inherited = set[str]().union(*elsewhere) - EVERY_METHOD
            names["defined"] |= members(kind) & inherited
            names["reached"] |= reached(kind, inherited)
    return names | {"reached": names["reached"] - names["defined"]}


def reached(kind: ast.ClassDef, inherited: set[str]) -> set[str]:
    """Return the inherited attributes in a class, and those of what the interface hands
    over.
    """
    names: set[str] = set()
    for node in ast.walk(kind):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).removeprefix("self.")
            if owner in HANDED:
                names.add(f"{owner}.{node.attr}")
            elif (
                owner in ("self", "cls", "super()", "other") and node.attr in inherited
            ):
                names.add(node.attr)
    return names


def style(files: Sequence[Source]) -> Figures:
    """Return what makes the lines of these files hard or easy to read."""
    code = sum(len(file.code) for file in files)
    long, groups = 0, 0
    lengths: list[int] = []
    for file in files:
        long += sum(len(file.lines[line - 1]) > 100 for line in file.code)
        for node in file.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lengths.append(len(file.code.intersection(_lines_of(node))))
            groups += isinstance(node, ast.Starred) and isinstance(
                node.value, (ast.Tuple, ast.List)
            )
    dense = {
        what: sum(file.count(*kinds) for file in files) for what, kinds in DENSE.items()
    }
    return {
        "code lines": code,
        "lines above 100 characters": long,
        "lines above 100 characters, % of code": 100 * long / code,
        "comment lines, % of code": (
            100 * sum(len(file.comments) for file in files) / code
        ),
        **{
            f"{what} per 1,000 code lines": 1000 * count / code
            for what, count in dense.items()
        },
        "star groups": groups,
        "function length, median": statistics.median(lengths),
        "function length, longest": max(lengths),
    }


def part_of(root: Path, file: Path) -> str:
    if file.is_relative_to(root / "tests"):
        return "tests"
    folders = ("lab",) if (root / "fedbn_flwr/lab").is_dir() else LAB
    return (
        "lab" if file.relative_to(root / "fedbn_flwr").parts[0] in folders else "core"
    )


def sizes(root: Path, files: Sequence[Source]) -> Figures:
    counts: Counter[str] = Counter()
    for file in files:
        part = part_of(root, file.path)
        counts.update(
            {
                f"{part}: statements": file.count(ast.stmt),
                f"{part}: lines": len(file.lines),
            }
        )
    return dict(sorted(counts.items()))


def run_with(root: Path, *arguments: str) -> Any:
    """Return the JSON in the last line of a fresh Python that imports the package of
    this checkout.
    """
    environment = os.environ | {"PYTHONPATH": str(root), "FLWR_TELEMETRY_ENABLED": "0"}
    printed = subprocess.check_output(
        [sys.executable, *arguments], env=environment, cwd=root, text=True
    )
    return json.loads(printed.splitlines()[-1])


def importing(root: Path, module: str) -> Figures:
    # the first reads the disk
    runs = [run_with(root, "-c", IMPORT.format(module)) for _ in range(6)]
    modules, seconds, cpu = map(statistics.median, zip(*runs[1:], strict=True))
    figures = {"modules": modules, "seconds": seconds, "CPU seconds": cpu}
    return {f"import {module}: {what}": value for what, value in figures.items()}


def files_of_a_round(root: Path) -> Figures:
    entered = run_with(root, str(ROOT / "benchmarks/reading_trace.py"))
    core = sum(part_of(root, Path(path)) == "core" for path in entered)
    return {
        "files of a FedAvg round": len(entered),
        "files of a FedAvg round: core": core,
    }


def figures_of(root: Path) -> Figures:
    found: Figures = {}
    for method in METHODS:
        names = names_for(root, root / f"fedbn_flwr/strategies/{method}.py")
        found[f"names for {method}"] = sum(map(len, names.values()))
        found.update(
            {f"names for {method}: {kind}": len(some) for kind, some in names.items()}
        )
    interface = Counter(
        map(
            type,
            source(root / "fedbn_flwr/server/methods/method.py").classes["Method"].body,
        )
    )
    found["interface: methods"] = interface[ast.FunctionDef]
    found["interface: annotated attributes"] = interface[ast.AnnAssign]
    package = [source(path) for path in (root / "fedbn_flwr").rglob("*.py")]
    tests = [source(path) for path in (root / "tests").rglob("*.py")]
    found |= files_of_a_round(root) | style(package) | importing(root, "fedbn_flwr")
    return (
        found
        | importing(root, "fedbn_flwr.strategies")
        | sizes(root, [*package, *tests])
    )


def main(
    package: Annotated[
        list[Path] | None, typer.Option(help="A checkout. Default: this one.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures here.")
    ] = None,
) -> None:
    roots = [path.resolve() for path in package or [ROOT]]
    columns = {
        f"{root.name} {commit(root)}".strip(): figures_of(root) for root in roots
    }
    rows = []
    for name in next(iter(columns.values())):
        values = [column[name] for column in columns.values()]
        digits = 0 if all(value == int(value) for value in values) else 3
        rows.append([name, *(number(value, digits) for value in values)])
    print(table(["", *columns], rows))
    if json_file:
        json_file.write_text(json.dumps(columns, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
