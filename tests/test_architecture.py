"""The rooms have limited sizes and layers, and imports point downwards.

The highest layer is the command line and the lowest the tensor code.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support import size

# one process, and therefore one tree of each module
pytestmark = pytest.mark.xdist_group("trees")

LIMITS = {"core": 121_600, "laboratory": 67_500, "tests": 243_900}
"""Most nodes of the syntax tree, 5 % above the true sizes."""

PACKAGE = size.ROOT / "fedbn_flwr"

LEVELS = (
    ("errors", "problems", "machine", "lazy"),
    ("training", "norms", "compat"),
    ("batchnorm",),
    ("doctor",),
    ("messages", "checked_file"),
    ("transport",),
    ("server/__init__", "server/methods", "engines"),
    ("server/runs",),
    ("server/rounds",),
    ("server/flower_calls",),
    ("server/strategy",),
    ("strategies", "privacy"),
    ("client",),
    ("legacy",),
    ("mods", "__init__"),
    # The layers above are the core; the layers below are the laboratory.
    ("lab/data", "lab/models", "lab/own_code", "lab/__init__"),
    ("lab/config",),
    ("lab/objects_of_config", "lab/early_stopping"),
    ("lab/partitioned",),
    ("lab/results",),
    ("lab/runs",),
    ("lab/studies",),
    ("lab/report",),
    ("lab/new_site", "lab/diagnose_run"),
    ("lab/cli",),
    ("app", "__main__"),
)
"""Each layer may import from its own level and from those above it in this list."""
TORCH_ONLY = (
    "errors",
    "problems",
    "training",
    "norms",
    "batchnorm",
    "doctor",
    "lab/data",
    "lab/models",
)
APART = (
    *(
        (f"server/{room}", "engines")
        for room in ("methods", "runs", "rounds", "flower_calls", "strategy")
    ),
    ("norms", "compat"),
    ("training", "compat"),
    ("lab/data", "lab/models"),
)
"""Rooms of one level that do not know each other."""
ROUND = ("strategies", "client", "engines", "mods")
OUTER = (
    "doctor.",
    "norms.",
    "batchnorm.adaptation.",
    "batchnorm.calibration.",
    "batchnorm.site_passes.",
    "privacy.accounting.",
    "privacy.differential.",
    "legacy.legacy_client.",
    "legacy.legacy_strategy.",
    "legacy.secure_aggregation.",
    "lab.",
)
"""The doors of a round, and modules that nothing behind these doors imports."""


LEVEL_OF = {}
for number, layers in enumerate(LEVELS):
    LEVEL_OF |= dict.fromkeys(layers, number)


def group_of(name: str) -> str | None:
    """Return a module's layer by its dotted name in the package, or None."""
    parts = name.split(".")
    for layer in ("/".join(parts[:2]), parts[0]):
        if layer in LEVEL_OF:
            return layer
    return None


@functools.cache
def modules() -> list[tuple[str | None, Path]]:
    """Return every module as (layer, file)."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found.append((group_of(name), path))
    return found


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path) -> list[tuple[str, int, bool]]:
    """Return (module imported, line, whether it runs on import) of every import.

    Imports in functions are included.
    """
    tree, found = tree_of(path), []
    # Code in a function, or only for type checkers, does not run on import.
    lazy = set()
    for block in ast.walk(tree):
        in_function = isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef)
        if in_function or (
            isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        ):
            lazy.update(id(node) for node in ast.walk(block))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [(name, node.lineno, id(node) not in lazy) for name in names]
    return found


def top(name: str) -> str:
    return name.split(".")[0]


def test_the_project_stays_small() -> None:
    for name, nodes in size.totals().items():
        assert nodes <= LIMITS[name], (
            f"{name}: {nodes:,} nodes of the syntax tree, the limit is"
            f" {LIMITS[name]:,}. Look for what your change makes superfluous (python -m"
            " tests.support.size prints the sizes). If nothing is, say so in the pull"
            " request: a maintainer may raise the limit"
        )


def test_every_module_has_a_room() -> None:
    assert [path for layer, path in modules() if layer is None] == []


def test_torch_only_modules_do_not_know_flower() -> None:
    wrong = []
    for layer, path in modules():
        if layer in TORCH_ONLY:
            for name, line, eager in imports(path):
                lazily_split = (
                    layer == "lab/data" and top(name) == "flwr_datasets" and not eager
                )
                if top(name) in ("flwr", "flwr_datasets", "ray") and not lazily_split:
                    wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {name}")
    assert wrong == []


def test_arrows() -> None:
    wrong = []
    for layer, path in modules():
        for name, line, _ in imports(path):
            other = group_of(name.removeprefix("fedbn_flwr."))
            if layer is None or other is None or not name.startswith("fedbn_flwr."):
                continue
            apart = (layer, other) in APART or (other, layer) in APART
            if LEVEL_OF[other] > LEVEL_OF[layer] or apart:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {name}")
    assert wrong == []


@functools.cache
def imported_modules() -> dict[str, set[str]]:
    """Return the modules of the package that each module imports, by dotted name.

    Imports in functions and imports only for types count as well.
    """
    paths = {}
    for _, path in modules():
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        paths[name.removesuffix(".__init__")] = path
    imported = {}
    for module, path in paths.items():
        names = {name for name, _, _ in imports(path)}
        files = {name if name in paths else name.rpartition(".")[0] for name in names}
        imported[module] = files & paths.keys()
    return imported


def test_a_round_never_imports_the_outer_ring() -> None:
    """Whoever reads a round need not read these rooms, not even through imports."""
    imported, found = imported_modules(), []
    for module in imported:
        if module.split(".")[1:2] in ([room] for room in ROUND):
            found.append(module)
    for module in found:  # grows
        found += imported[module] - {*found}
    outer = tuple(f"fedbn_flwr.{room}" for room in OUTER)
    assert [module for module in found if f"{module}.".startswith(outer)] == []


def test_no_files_form_a_circle() -> None:
    """A circle has no first file to read."""
    try:
        TopologicalSorter(imported_modules()).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle: {' < '.join(error.args[1])}") from None


def test_no_module_imports_from_the_package_root() -> None:
    """The root re-exports upper layers, so such an import points upwards."""
    names = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    for layer, path in modules():
        if layer != "__init__":
            for name, line, _ in imports(path):
                if top(name) == "fedbn_flwr":
                    assert name.split(".")[1] in names, f"{path}:{line} imports {name}"


def test_the_lists_above_name_real_rooms() -> None:
    assert LEVEL_OF.keys() == {layer for layer, _ in modules() if layer}
    assert LEVEL_OF.keys() >= set(TORCH_ONLY).union(*APART)


def test_no_zip_drops_the_end_of_a_longer_input() -> None:
    """Otherwise, one client's values may meet another client's name."""
    loose = []
    for _, path in modules():
        for call in ast.walk(tree_of(path)):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "zip":
                options = {one.arg: ast.unparse(one.value) for one in call.keywords}
                if options != {"strict": "True"}:
                    loose.append(f"{path.relative_to(PACKAGE)}:{call.lineno}")
    assert loose == []


# Each is a registry; the comment above it gives the reason.
REGISTRIES = {"_KEPT", "_OWNERS", "_REGISTERED", "_STARTS"}
MUTATORS = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem"}
MUTATORS |= {"remove", "setdefault", "update"}


def changed_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names whose values a module's functions change in place or set."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in (node for function in functions for node in ast.walk(function)):
        changed = []
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Attribute) and node.attr in MUTATORS:
            changed = [node.value]
        elif isinstance(node, ast.Assign | ast.Delete | ast.AugAssign):
            places = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            changed = [one.value for one in places if isinstance(one, ast.Subscript)]
        yield from (one.id for one in changed if isinstance(one, ast.Name))


def test_modules_have_no_state() -> None:
    """No attribute of a module changes after the import, except in registries."""
    found = {}
    for _, path in modules():
        tree = tree_of(path)
        own = set()
        for statement in tree.body:
            if isinstance(statement, ast.Assign):
                own |= {ast.unparse(target) for target in statement.targets}
            elif isinstance(statement, ast.AnnAssign):
                own.add(ast.unparse(statement.target))
        for name in own & set(changed_names(tree)):
            found[name] = str(path.relative_to(PACKAGE))
    assert found.keys() == REGISTRIES, found
