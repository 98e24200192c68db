"""The core needs only flwr, torch, numpy, pydantic and safetensors.

The packages of the laboratory are not required.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fedbn_flwr
import fedbn_flwr.lab
from fedbn_flwr.errors import ConfigError, needs_package
from tests.support.checkout import PYPROJECT, ROOT
from tests.test_architecture import imports

PACKAGE = ROOT / "fedbn_flwr"
STANDS_ON = {"flwr", "torch", "numpy", "pydantic", "safetensors"}
BROUGHT = {
    "typing_extensions": "pydantic and torch bring it: TypeVar with a default",
    "grpc": "flwr brings it: FedTAN's channel",
    "cryptography": (
        "flwr brings it: masks, and noise whose generator cannot be guessed"
    ),
    "httpx": "flwr brings it: its errors, over a network",
    "click": "flwr brings it: errors of the arguments of its commands",
}
WHERE_USED = {
    ("training", "sklearn"): "metrics of scikit-learn",
    ("privacy", "dp_accounting"): "epsilon",
}
"""Imported inside a function, with an error that names the package."""

# Block the packages that the packages below do not install. Our own modules may import
# only the modules in `ours`.
BLOCK = """
import builtins, sys

sys.path[:0] = sys.argv.pop(1).split(",")
brought, ours = (set(sys.argv.pop(1).split(",")) for _ in range(2))

class Brought:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top in brought | set(sys.stdlib_module_names) or top.startswith("_sysconfigdata"):
            return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

def import_(name, globals=None, locals=None, fromlist=(), level=0):
    asks = (globals or {}).get("__name__", "")
    top = name.split(".")[0]
    if asks.startswith("fedbn_flwr") and not level and top not in ours | set(sys.stdlib_module_names):
        raise ModuleNotFoundError(f"{asks} imports {name}", name=name)
    return import__(name, globals, locals, fromlist, level)

sys.meta_path[:] = map(Brought, sys.meta_path)
import__, builtins.__import__ = builtins.__import__, import_
"""


# A project of Flower with its own training function, and the client code that FedBN,
# FixBN and FedTAN need.
PLUG_IN = """
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedbn_flwr.doctor, fedbn_flwr.training, sys
from fedbn_flwr import InProcessGrid, TorchClient, client_app, split_state
from fedbn_flwr.mods import answer_query, bn_mod, bn_rules
from fedbn_flwr.strategies import FedBN, FedTAN, FixBN

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

def loader(context):
    made = torch.Generator().manual_seed(context.node_config["partition-id"])
    inputs = torch.randn(16, 4, generator=made) + context.node_config["partition-id"]
    return DataLoader(TensorDataset(inputs, torch.randint(2, (16,), generator=made)), batch_size=8)

app = ClientApp(mods=[bn_mod])

@app.query()
def query(msg, context):
    return answer_query(msg, context, loader(context))

@app.query("exchange")
@app.train()
def train(msg, context):
    net = model()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with bn_rules(net, msg, context) as rules:
        for inputs, targets in loader(context):
            optimizer.zero_grad()
            with rules.step(len(inputs)):
                nn.functional.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
    metrics = MetricRecord({"num-examples": 16})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=msg)

@app.evaluate()
def evaluate(msg, context):
    net = model()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    net.eval()
    inputs, targets = loader(context).dataset.tensors
    with torch.no_grad():
        right = (net(inputs).argmax(1) == targets).float().mean().item()
    metrics = MetricRecord({"num-examples": 16, "accuracy": right})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)

start = model().state_dict()
for kind in (FedBN, FixBN, FedTAN):
    with InProcessGrid(app, num_nodes=2) as grid:
        strategy = kind(parts=split_state(model()))
        result = strategy.start(grid=grid, initial_arrays=ArrayRecord(start), num_rounds=2)
    end = result.arrays.to_torch_state_dict()
    moved = [name for name in start if not torch.equal(end[name], start[name])]
    assert 0 <= result.evaluate_metrics_clientapp[2]["accuracy"] <= 1
    print(kind.__name__, *moved)

class Memory:
    def __len__(self):
        return 16
    def batch(self, positions, generator=None):
        return torch.ones(len(positions), 4), torch.zeros(len(positions), dtype=torch.int64)

def client_fn(context):
    settings = fedbn_flwr.training.LocalTraining(learning_rate=fedbn_flwr.training.LearningRate(0.1), batch_size=8)
    return TorchClient(model(), Memory(), Memory(), settings, context=context)

with InProcessGrid(client_app(client_fn), num_nodes=2) as grid:
    FedBN(parts=split_state(model())).start(grid=grid, initial_arrays=ArrayRecord(start), num_rounds=1)
assert not [name for name in sys.modules if name.startswith("fedbn_flwr.lab")]
"""


def package_of(requirement: str) -> str:
    """Return the normalised name in a requirement."""
    return canonicalize_name(Requirement(requirement).name)


@functools.cache
def brought_by(*packages: str) -> frozenset[str]:
    """Return the top-level modules of packages and requirements, without extras."""
    distributions, left = set(), list(packages)
    while left:
        name = left.pop()
        if name in distributions:
            continue
        try:
            required = requires(name) or []
        except PackageNotFoundError:  # for another system
            continue
        distributions.add(name)
        left += [package_of(line) for line in required if "extra ==" not in line]
    modules = set()
    for module, owners in packages_distributions().items():
        if distributions.intersection(map(canonicalize_name, owners)):
            modules.add(module)
    return frozenset(modules)


def python(
    code: str, folder: Path, checkout: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    brought = brought_by(*sorted(STANDS_ON)) | {"fedbn_flwr"}
    assert brought.isdisjoint(
        {"PIL", "cloudpickle", "datasets", "matplotlib", "pandas", "ray", "sklearn"}
    )
    ours = {"fedbn_flwr", *STANDS_ON, *BROUGHT}
    words = [str(checkout), ",".join(brought), ",".join(ours)]
    return subprocess.run(
        [sys.executable, "-c", BLOCK + code, *words],
        cwd=folder,
        env={**os.environ, "FLWR_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_three_methods_plug_into_a_project_of_flowers(tmp_path) -> None:
    done = python(PLUG_IN, tmp_path)
    assert done.returncode == 0, done.stderr
    moved = {}
    for line in done.stdout.splitlines()[-3:]:
        name, *entries = line.split()
        moved[name] = set(entries)
    weights = {"0.weight", "3.weight", "3.bias"}
    statistics = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    everything = weights | statistics | {"1.weight", "1.bias"}
    assert moved == {"FedBN": weights, "FixBN": everything, "FedTAN": everything}


WITHOUT = """
import sys
from fedbn_flwr.__main__ import main
from fedbn_flwr.errors import FedBNError
for name in ("pandas", "fedbn_flwr.lab.data", "fedbn_flwr.lab.runs.default_app", "fedbn_flwr.app"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        print("blocked")
    except FedBNError as error:
        print(error.code)
sys.argv = ["fedbn-flwr", "--help"]
main()
"""


def test_without_the_extra_the_laboratory_says_what_to_install(tmp_path) -> None:
    done = python(WITHOUT, tmp_path)
    assert done.stdout.split()[-4:] == ["blocked", *["missing-extra"] * 3]
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert '): pip install ".[lab]" in the checkout' in line


def test_the_two_installs_are_what_each_half_imports() -> None:
    project = PYPROJECT["project"]
    assert {*map(package_of, project["dependencies"])} == STANDS_ON
    extra = {package_of(one) for one in project["optional-dependencies"]["lab"]}
    owners = packages_distributions()
    needs = set()
    for name in fedbn_flwr.lab._NEEDS:
        needs.update(map(canonicalize_name, owners[name]))
    assert needs == extra - {"flwr"}, "the laboratory checks the packages of the extra"


@pytest.mark.xdist_group("trees")
def test_the_core_names_no_other_package() -> None:
    """This includes functions, and packages that flwr installs, such as typer."""
    allowed = STANDS_ON | BROUGHT.keys() | sys.stdlib_module_names | {"fedbn_flwr"}
    named = set()
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        for name, line, on_import in imports(path) if room != "lab" else ():
            package = name.split(".")[0]
            if package not in allowed:
                assert not on_import, (
                    f"{path}:{line} imports {name} when it is imported"
                )
                named.add((room, package))
    assert named == WHERE_USED.keys()


def test_an_absent_package_is_named() -> None:
    with (
        pytest.raises(ConfigError, match="scikit-learn"),
        needs_package("scikit-learn", "metrics"),
    ):
        import fedbn_no_such_package  # noqa: F401


def test_every_lazy_name_is_there() -> None:
    assert fedbn_flwr._WHERE.keys() == set(fedbn_flwr.__all__)
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    branches = [node for node in tree.body if isinstance(node, ast.If)]
    (block,) = [one for one in branches if ast.unparse(one.test) == "TYPE_CHECKING"]
    shown = {}
    for node in block.body:
        module = node.module.removeprefix("fedbn_flwr.")
        shown |= {alias.name: module for alias in node.names}
    assert shown == fedbn_flwr._WHERE, "the names for a type checker"
    for name in (*fedbn_flwr.__all__, *fedbn_flwr._ROOMS):
        assert name in dir(fedbn_flwr)
        assert getattr(fedbn_flwr, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(fedbn_flwr, "no_such_name")  # noqa: B009
