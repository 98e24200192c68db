"""The core without the packages of the laboratory: flwr, torch, numpy, pydantic and safetensors are enough."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

import fedbn_flwr
from fedbn_flwr.errors import ConfigError, needs_package

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fedbn_flwr"
STANDS_ON = {"flwr", "torch", "numpy", "pydantic", "safetensors"}
BROUGHT = {
    "typing_extensions": "pydantic and torch bring it: TypeVar with a default",
    "grpc": "flwr brings it: FedTAN's channel",
    "cryptography": "flwr brings it: masks, and noise whose generator cannot be guessed",
    "httpx": "flwr brings it: its errors, over a network",
    "click": "flwr brings it: errors of the arguments of its commands",
}
WHERE_USED = {
    ("training", "sklearn"): "metrics of scikit-learn",
    ("privacy", "dp_accounting"): "epsilon",
    ("doctor", "matplotlib"): "pictures",
    ("engines", "cloudpickle"): "an app for new processes",
}
"""Imported inside a function, with an error that names the package."""

# Blocks what none of the packages below brings, whoever asks, and what a module of ours asks for by name.
BLOCK = """
import builtins, sys

sys.path[:0] = sys.argv.pop(1).split(",")
brought, ours = (set(sys.argv.pop(1).split(",")) for _ in range(2))

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in brought | set(sys.stdlib_module_names):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

def import_(name, globals=None, locals=None, fromlist=(), level=0):
    asks = (globals or {}).get("__name__", "")
    top = name.split(".")[0]
    if asks.startswith("fedbn_flwr") and not level and top not in ours | set(sys.stdlib_module_names):
        raise ModuleNotFoundError(f"{asks} imports {name}", name=name)
    return import__(name, globals, locals, fromlist, level)

sys.meta_path.insert(0, Refuse())
import__, builtins.__import__ = builtins.__import__, import_
"""

TRAIN = """
import fedbn_flwr
import fedbn_flwr.doctor, fedbn_flwr.mods, fedbn_flwr.strategies
import torch
from torch import nn
from fedbn_flwr import InProcessGrid, TorchClient, client_app, split_state
from fedbn_flwr.strategies import FedBN
from fedbn_flwr.training import LearningRate, LocalTraining
from flwr.app import ArrayRecord

class Memory:
    def __init__(self, seed):
        made = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(32, 4, generator=made)
        self.targets = torch.randint(2, (32,), generator=made)
    def __len__(self):
        return 32
    def batch(self, positions, generator=None):
        return self.inputs[positions], self.targets[positions]

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

def client_fn(context):
    data = Memory(context.node_config["partition-id"])
    settings = LocalTraining(learning_rate=LearningRate(0.1), batch_size=8)
    return TorchClient(model(), data, data, settings, context=context)

start = model().state_dict()
with InProcessGrid(client_app(client_fn), num_nodes=2) as grid:
    strategy = FedBN(parts=split_state(model()))
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(start), num_rounds=1)
end = result.arrays.to_torch_state_dict()
assert not torch.equal(end["0.weight"], start["0.weight"])
assert 0 <= result.evaluate_metrics_clientapp[1]["accuracy"] <= 1
assert not [name for name in sys.modules if name.startswith("fedbn_flwr.lab")]
print("trained")
"""


@functools.cache
def brought_by(*packages: str) -> frozenset[str]:
    """The top-level modules of these packages and of all that they require, without their extras."""
    distributions, left = set[str](), list(packages)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in distributions:
            continue
        try:
            required = requires(name) or []
        except PackageNotFoundError:  # of another system
            continue
        distributions.add(name)
        left += [re.split(r"[^\w.-]", line)[0] for line in required if "extra ==" not in line]
    found = packages_distributions().items()
    return frozenset(
        module for module, owners in found if any(re.sub(r"[-_.]+", "-", o).lower() in distributions for o in owners)
    )


def python(code: str, folder: Path, checkout: Path = ROOT) -> subprocess.CompletedProcess[str]:
    brought = brought_by(*sorted(STANDS_ON)) | {"fedbn_flwr"}
    assert brought.isdisjoint({"PIL", "cloudpickle", "datasets", "matplotlib", "pandas", "plotly", "ray", "sklearn"})
    ours = {"fedbn_flwr", *STANDS_ON, *BROUGHT}
    return subprocess.run(
        [sys.executable, "-c", BLOCK + code, str(checkout), ",".join(brought), ",".join(ours)],
        cwd=folder,
        env={**os.environ, "FLWR_HOME": str(folder / "home"), "FLWR_TELEMETRY_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_core_trains_without_the_packages_of_the_laboratory(tmp_path: Path) -> None:
    done = python(TRAIN, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "trained"


BLOCKED = """
for name in ("pandas", "fedbn_flwr.lab.cli"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        print(error)
"""


def test_the_block_blocks(tmp_path: Path) -> None:
    assert python(BLOCKED, tmp_path).stdout == "pandas is blocked\nfedbn_flwr.lab.cli.before imports typer\n"


def test_the_core_names_no_other_package() -> None:
    """Also in functions, and of packages that flwr happens to bring, such as typer."""
    named = set()
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        if room == "lab":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for node in ast.walk(function)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            for name in names:
                top = name.split(".")[0]
                if top in STANDS_ON | BROUGHT.keys() | sys.stdlib_module_names | {"fedbn_flwr"}:
                    continue
                assert (room, top) in WHERE_USED, f"{path}:{node.lineno} imports {name}"
                assert id(node) in inside, f"{path}:{node.lineno} imports {name} when it is imported"
                named.add((room, top))
    assert named == WHERE_USED.keys()


def test_an_absent_package_is_named() -> None:
    with pytest.raises(ConfigError, match="scikit-learn"), needs_package("scikit-learn", "metrics"):
        import fedbn_no_such_package  # noqa: F401


def test_every_lazy_name_is_there() -> None:
    assert fedbn_flwr._WHERE.keys() == set(fedbn_flwr.__all__)
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    shown = {
        alias.name: node.module.removeprefix("fedbn_flwr.")
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert shown == fedbn_flwr._WHERE, "what a type checker sees"
    for name in (*fedbn_flwr.__all__, *fedbn_flwr._ROOMS):
        assert name in dir(fedbn_flwr)
        assert getattr(fedbn_flwr, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(fedbn_flwr, "no_such_name")  # noqa: B009
