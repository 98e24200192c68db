"""The core imports with the oldest Flower, but the suite does not install it.

``oldest_flower.txt`` lists the names that Flower 1.28.0 had. If an import is not in the
file, write it in ``compat/flower.py`` with its older place under ``try``, or add it to
the file after ``make compat SETS=3.11/1.28/2.6`` has passed with it.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

import fedbn_flwr

PACKAGE = Path(fedbn_flwr.__file__).parent
OLDEST = Path(__file__).with_name("oldest_flower.txt")
# Only the laboratory imports these, and it requires a newer Flower.
LAB = (PACKAGE / "lab", PACKAGE / "compat/node_key.py")


def imported(node: ast.AST) -> Iterator[str]:
    """Yield the names that a file imports from Flower, except in ``try`` bodies."""
    if isinstance(node, ast.Try):
        for handler in node.handlers:
            yield from imported(handler)
        return
    if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("flwr."):
        yield from (f"{node.module} {alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imported(child)


def test_what_the_core_imports_is_in_the_oldest_flower() -> None:
    oldest = set(OLDEST.read_text(encoding="utf-8").splitlines())
    missing = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if not any(path.is_relative_to(part) for part in LAB):
            names = set(imported(ast.parse(path.read_text(encoding="utf-8"))))
            if new := names - oldest:
                missing[str(path.relative_to(PACKAGE))] = sorted(new)
    assert not missing


@pytest.mark.skipif(
    not version("flwr").startswith("1.28."), reason="another Flower is here"
)
def test_the_oldest_flower_has_what_the_file_says() -> None:
    for line in OLDEST.read_text(encoding="utf-8").splitlines():
        module, name = line.split()
        assert hasattr(importlib.import_module(module), name), line
