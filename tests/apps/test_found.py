"""Projects of Flower's repository, changed by the diffs in ``found``, end in the bits
of our own client.

``FLOWER_REPOSITORY`` names a checkout of github.com/adap/flower; without it only the
lines are counted. The projects' data loaders, which download, are replaced by digits in
a fixed order, and W&B by nothing. ``PROJECT-port.diff`` is what Flower 1.41 requires,
``PROJECT-model.diff`` gives a model without BatchNorm two such layers; neither is
counted.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.common import parameters_to_ndarrays
from flwr.server import Server
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fedbn_flwr.client import TorchClient
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.messages.records import from_record, to_record, to_state
from fedbn_flwr.strategies import FedBN, FedTAN, FixBN, Strategy
from fedbn_flwr.training import LearningRate, LocalTraining
from tests.support.diffs import changed_lines

REPOSITORY = Path(os.environ.get("FLOWER_REPOSITORY", "/nowhere"))
DIFFS = Path(__file__).parent / "found"
SIZES, BATCH = (96, 64, 128), 32
here = pytest.mark.skipif(
    not (REPOSITORY / "examples").is_dir(), reason="FLOWER_REPOSITORY names no checkout"
)

QUICKSTART, ADVANCED, BASELINE = "quickstart-pytorch", "advanced-pytorch", "fedbn"
FOLDERS = {
    QUICKSTART: "examples/quickstart-pytorch",
    ADVANCED: "examples/advanced-pytorch",
    BASELINE: "baselines/fedbn",
}
PACKAGES = {
    QUICKSTART: "pytorchexample",
    ADVANCED: "pytorch_example",
    BASELINE: "fedbn",
}
METHODS: dict[str, Callable[[], Strategy]] = {
    "fedbn": FedBN,
    "fixbn": FixBN,
    "fedtan": FedTAN,
}
# the advanced example halves its rate in round 5
ROUNDS = {QUICKSTART: 2, ADVANCED: 5, BASELINE: 2}
CONFIG: dict[str, dict[str, Any]] = {
    QUICKSTART: {"fraction-evaluate": 1.0},
    ADVANCED: {"fraction-train": 1.0, "fraction-evaluate": 1.0},
    BASELINE: {"algorithm-name": "FedAvg", "num-clients": 3, "fraction-evaluate": 1.0},
}
# Lines that are new or different, and how many of them are only indented. Blank ones
# and docstrings are not counted.
LINES = {
    (QUICKSTART, "fedbn"): (4, 0),
    (QUICKSTART, "fixbn"): (12, 7),
    (QUICKSTART, "fedtan"): (22, 9),
    (ADVANCED, "fedbn"): (5, 0),
    (ADVANCED, "fixbn"): (14, 7),
    (ADVANCED, "fedtan"): (23, 9),
    (BASELINE, "fedbn"): (14, 1),
    (BASELINE, "fixbn"): (22, 8),
    (BASELINE, "fedtan"): (35, 10),
}


@pytest.mark.parametrize(("project", "method"), LINES)
def test_the_number_of_lines_to_change(project: str, method: str) -> None:
    old, new = changed_lines(DIFFS / f"{project}-{method}.diff")
    assert (len(new), sum(line in old for line in new)) == LINES[project, method]


class Local(Dataset[Any]):
    """A client's digits, in the contrast of its own scanner; as dictionaries where the
    project has them so.
    """

    def __init__(self, node: int, size: int, channels: int, key: str = "") -> None:
        pictures, labels = load_digits(return_X_y=True)
        first = sum(SIZES[:node])
        images = (
            torch.tensor(
                pictures[first : first + SIZES[node]], dtype=torch.float32
            ).view(-1, 1, 8, 8)
            / 16
        )
        images = F.interpolate(images, size, mode="bilinear").expand(
            -1, channels, -1, -1
        )
        self.inputs = ((1 - 0.25 * node) * images + 0.25 * node).contiguous()
        self.targets = torch.tensor(labels[first : first + SIZES[node]])
        self.key = key

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> Any:
        return (
            {self.key: self.inputs[i], "label": self.targets[i]}
            if self.key
            else (self.inputs[i], self.targets[i])
        )

    def batch(
        self, positions: torch.Tensor, generator: torch.Generator | None = None
    ) -> Any:
        return self.inputs[positions], self.targets[positions]

    def with_transform(self, transform: Any) -> Local:
        return self


DATA: dict[str, Callable[[int], Local]] = {
    QUICKSTART: lambda node: Local(node, 32, 3, "img"),
    ADVANCED: lambda node: Local(node, 28, 1, "image"),
    BASELINE: lambda node: Local(node, 28, 3),
}


def own_data(
    project: str, modules: Mapping[str, ModuleType], patch: pytest.MonkeyPatch
) -> None:
    """Put local data where the project downloads its own."""
    loaders = [DataLoader(DATA[project](node), BATCH) for node in range(len(SIZES))]

    def pair(node: int, *_: Any) -> Any:
        return loaders[node], loaders[node]

    if project == BASELINE:
        data = [(loader, loader, f"set {node}") for node, loader in enumerate(loaders)]
        patch.setattr(modules["client_app"], "get_data", lambda context: data)
        return
    patch.setattr(modules["client_app"], "load_data", pair)
    if project == QUICKSTART:
        patch.setattr(
            modules["server_app"], "load_centralized_dataset", lambda: loaders[0]
        )
    else:
        patch.setattr(
            modules["server_app"],
            "load_dataset",
            lambda name: {"test": DATA[project](0)},
        )


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``found(project, *diffs, **run_config)``: a copy, ported and changed, run in
    process; what it ended in.
    """

    def run(project: str, *diffs: str, **run_config: Any) -> SimpleNamespace:
        folder, package = tmp_path / project, PACKAGES[project]
        shutil.copytree(REPOSITORY / FOLDERS[project], folder)
        for diff in (DIFFS / f"{project}-{name}.diff" for name in ("port", *diffs)):
            if diff.is_file():
                subprocess.run(["git", "apply", str(diff)], cwd=folder, check=True)
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)
        wandb = ModuleType("wandb")
        wandb.init = wandb.log = lambda *args, **kwargs: None  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        names = ("client_app", "server_app", "model" if project == BASELINE else "task")
        modules = {name: importlib.import_module(f"{package}.{name}") for name in names}
        own_data(project, modules, monkeypatch)
        declared = tomllib.loads((folder / "pyproject.toml").read_text())["tool"][
            "flwr"
        ]["app"]["config"]
        config = {
            **declared,
            **CONFIG[project],
            "num-server-rounds": ROUNDS[project],
            **run_config,
        }
        assert config.keys() == declared.keys()
        seen = SimpleNamespace(
            folder=folder,
            model=getattr(modules[names[2]], "CNNModel", None),
            strategy=None,
        )
        seen.model = seen.model or modules[names[2]].Net
        with (
            monkeypatch.context() as while_it_runs,
            InProcessGrid(
                modules["client_app"].app, len(SIZES), run_config=config
            ) as grid,
        ):
            watch(seen, while_it_runs)
            torch.manual_seed(0)
            modules["server_app"].app(grid, Context(1, 0, {}, RecordDict(), config))
        if (saved := folder / "final_model.pt").exists():
            seen.state = to_state(torch.load(saved))
        return seen

    before = set(sys.modules)
    yield run
    for name in set(sys.modules) - before:
        if name.split(".")[0] in PACKAGES.values():
            del sys.modules[name]


def watch(seen: SimpleNamespace, patch: pytest.MonkeyPatch) -> None:
    """Note our strategy, and the last model where the project does not write it."""
    prepare, start, fit = Strategy.prepare, Strategy.start, Server.fit

    def prepare_and_note(self: Strategy, *args: Any) -> int:
        seen.strategy = self
        return prepare(self, *args)

    def start_and_note(self: Strategy, *args: Any, **kwargs: Any) -> Any:
        result = start(self, *args, **kwargs)
        seen.state = from_record(result.arrays)
        return result

    def fit_and_note(self: Server, num_rounds: int, timeout: float | None) -> Any:
        history = fit(self, num_rounds, timeout)
        seen.arrays = parameters_to_ndarrays(self.parameters)
        seen.state = dict(zip(seen.model().state_dict(), seen.arrays, strict=False))
        return history

    patch.setattr(Strategy, "prepare", prepare_and_note)
    patch.setattr(Strategy, "start", start_and_note)
    patch.setattr(Server, "fit", fit_and_note)


class InOrder(LocalTraining):
    """The projects' loaders do not shuffle here."""

    def batches(
        self, num_examples: int, generator: torch.Generator
    ) -> Iterator[torch.Tensor]:
        loader = DataLoader(TensorDataset(torch.arange(num_examples)), self.batch_size)
        yield from (
            positions for _ in range(self.local_epochs) for (positions,) in loader
        )


class OurClient(TorchClient):
    """Our client with a project's settings: plain SGD, the baseline's rate of 0.01."""

    rate, momentum = 0.01, 0.0

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        rate = LearningRate(self.rate_of(int(config["server-round"])))
        self.settings = InOrder(
            learning_rate=rate, batch_size=BATCH, sgd_momentum=self.momentum
        )
        return super().fit(parameters, config)

    def rate_of(self, server_round: int) -> float:
        return self.rate

    def get_properties(self, config: dict[str, Any]) -> Any:
        return {**super().get_properties(config), "batch-size": BATCH}


class OurQuickstartClient(OurClient):
    rate, momentum = 0.1, 0.9


class OurAdvancedClient(OurQuickstartClient):
    """With the example's own touch: the classifier's last layer is restored from this
    client's last round.
    """

    def rate_of(self, server_round: int) -> float:
        return self.rate * (0.5 if server_round >= 5 else 1.0)

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        result = super().fit(self._with_head(parameters, config), config)
        head = {
            name: array
            for name, array in self._state().items()
            if name.startswith("fc2.")
        }
        self.context.state["head"] = to_record(head)  # type: ignore[union-attr]
        return result

    def evaluate(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        return super().evaluate(self._with_head(parameters, config), config)

    def _with_head(self, parameters: list[Any], config: dict[str, Any]) -> list[Any]:
        own = from_record(self.context.state.array_records.get("head", ArrayRecord()))  # type: ignore[union-attr]
        return [
            own.get(name, array)
            for name, array in zip(
                json.loads(config["fedbn-flwr.array-names"]), parameters, strict=True
            )
        ]


def seeded(make: Callable[[], torch.nn.Module]) -> Callable[[], torch.nn.Module]:
    """The model with the weights that the project's server began with."""

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return make()

    return model


CLIENTS = {
    QUICKSTART: OurQuickstartClient,
    ADVANCED: OurAdvancedClient,
    BASELINE: OurClient,
}


@here
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("project", FOLDERS)
def test_a_changed_project_ends_in_the_bits_of_our_own_client(
    found: Any, federate: Any, same_bits: Any, project: str, method: str
) -> None:
    theirs = found(project, "model", method)
    assert [report.rejected for report in theirs.strategy.reports] == [{}] * ROUNDS[
        project
    ]

    data = [DATA[project](node) for node in range(len(SIZES))]
    options = {
        "rounds": ROUNDS[project],
        "client": CLIENTS[project],
        "grid_options": {"threads": len(SIZES)},
    }
    make = (
        METHODS[method]
        if (project, method) != (ADVANCED, "fixbn")
        else lambda: FixBN(freeze_at=2)
    )
    ours = federate(make(), seeded(theirs.model), data, **options)
    same_bits(theirs.state, ours.state)
    assert theirs.strategy.run.kept.hashes == ours.strategy.run.kept.hashes
    assert len(theirs.strategy.run.kept.hashes) == (
        len(SIZES) if method == "fedbn" else 0
    )
    assert [r.phase for r in theirs.strategy.reports] == [
        r.phase for r in ours.strategy.reports
    ]
    assert len({r.phase for r in theirs.strategy.reports}) == (
        2 if method == "fixbn" else 1
    )
    accuracy = "accuracy" if project == BASELINE else "eval_acc"
    for report, own in zip(theirs.strategy.reports, ours.strategy.reports, strict=True):
        for client, metrics in own.evaluations.items():
            assert report.evaluations[client][accuracy] == pytest.approx(
                metrics["accuracy"]
            )


@here
@pytest.mark.parametrize("project", FOLDERS)
def test_the_unchanged_projects_run(found: Any, project: str) -> None:
    run = found(project)
    assert run.strategy is None
    assert all(np.isfinite(array).all() for array in run.state.values())


@here
def test_the_baselines_own_fedbn_differs_only_in_rounding(
    found: Any, federate: Any
) -> None:
    """Its layers are all called ``bn``; Flower's FedAvg sums in another order than
    ours. Training enlarges it later.
    """
    theirs = found(BASELINE, **{"algorithm-name": "FedBN", "num-server-rounds": 1})
    data = [DATA[BASELINE](node) for node in range(len(SIZES))]
    ours = federate(FedBN(), seeded(theirs.model), data, rounds=1, client=OurClient)
    shared = [name for name in ours.state if "bn" not in name]
    assert len(theirs.arrays) == len(shared)
    for name, array in zip(shared, theirs.arrays, strict=True):
        np.testing.assert_allclose(
            array, ours.state[name], rtol=0, atol=2e-8, err_msg=name
        )
