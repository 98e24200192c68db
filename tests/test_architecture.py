"""Arrows between modules point one way: pure torch < strategies and client < engines < experiment < command line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import fedbn_flwr

PACKAGE = Path(fedbn_flwr.__file__).parent
TORCH_ONLY = ("averaging", "data", "errors", "evaluation", "models", "norms", "randomness", "seeds", "state", "syncbn")
TORCH_ONLY += ("agc", "steps", "tasks", "training", "wrappers")
EDGE = ("records", "wire", "local_state", "exchange")  # know Flower's records, and nothing of strategies or clients
FORBIDDEN = {
    **dict.fromkeys(TORCH_ONLY + EDGE, ("client", "engines", "exchange", "experiment", "cli", "app", "strategies")),
    "strategies": ("client", "engines", "experiment", "cli", "app"),
    **dict.fromkeys(("client", "mods", "rules"), ("engines", "experiment", "cli", "app")),
    "legacy": ("client", "engines", "experiment", "cli", "app"),
    "engines": ("strategies", "client", "experiment", "cli", "app", "deployment"),
    "deployment": ("strategies", "client", "experiment", "cli", "app"),
    "experiment": ("cli",),
}


def modules() -> list[tuple[str, Path]]:
    """Every module as (first name below the package, file)."""
    found = [(path.relative_to(PACKAGE), path) for path in sorted(PACKAGE.rglob("*.py"))]
    return [(relative.parts[0].removesuffix(".py"), path) for relative, path in found]


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Yield (module imported, line, whether it runs on import) of every import statement, in functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lazy = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING")
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, node.lineno, id(node) not in lazy


def top(name: str) -> str:
    return name.split(".")[0]


def test_torch_only_modules_do_not_know_flower() -> None:
    wrong = []
    for group, path in modules():
        if group in TORCH_ONLY:
            for name, line, eager in imports(path):
                lazily_split = group == "data" and top(name) == "flwr_datasets" and not eager
                if top(name) in ("flwr", "flwr_datasets", "ray") and not lazily_split:
                    wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {name}")
    assert wrong == []


def test_arrows() -> None:
    wrong = []
    for group, path in modules():
        for name, line, _ in imports(path):
            parts = name.split(".")
            if parts[0] == "fedbn_flwr" and len(parts) > 1 and parts[1] in FORBIDDEN.get(group, ()):
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {name}")
    assert wrong == []


def test_no_module_imports_from_the_package_root() -> None:
    """The root re-exports from the upper layers: importing it from below would be an arrow upwards."""
    names = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    for group, path in modules():
        if group != "__init__":
            for name, line, _ in imports(path):
                if top(name) == "fedbn_flwr":
                    assert name.split(".")[1] in names, f"{path}:{line} imports {name}"


def test_the_lists_above_name_real_modules() -> None:
    assert set(TORCH_ONLY + EDGE) <= {group for group, _ in modules()}


def test_no_module_state() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for _, path in modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Global)
    ]
    assert wrong == []
