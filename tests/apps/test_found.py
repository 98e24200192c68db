"""Projects of Flower's repository, changed by the diffs in ``found``, end in the bits
of our own client.

``FLOWER_REPOSITORY`` names a checkout of github.com/adap/flower; without it only the
lines are counted. The projects' data loaders, which download, are replaced by digits in
a fixed order, and W&B by nothing. ``PROJECT-port.diff`` is what Flower 1.41 requires,
``PROJECT-model.diff`` gives a model without BatchNorm two such layers; neither is
counted. moon, heterofl and pytorch-from-centralized-to-federated are not run here: they
need hydra, or processes of their own.
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
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import parameters_to_ndarrays
from flwr.server import Server
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fedbn_flwr import strategies
from fedbn_flwr.client import TorchClient
from fedbn_flwr.client.hooks import Hooks
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
TEMPLATE, FEDREP = "pytorch-app", "fedrep"
FOLDERS = {
    QUICKSTART: "examples/quickstart-pytorch",
    ADVANCED: "examples/advanced-pytorch",
    BASELINE: "baselines/fedbn",
    TEMPLATE: "pytorch-app",
    FEDREP: "baselines/fedrep",
}
PACKAGES = {
    QUICKSTART: "pytorchexample",
    ADVANCED: "pytorch_example",
    BASELINE: "fedbn",
    TEMPLATE: "pytorchapp",
    FEDREP: "fedrep",
}
METHODS: dict[str, Callable[[], Strategy]] = {
    "fedbn": FedBN,
    "fixbn": FixBN,
    "fedtan": FedTAN,
}
# the advanced example halves its rate in round 5
ROUNDS = {QUICKSTART: 2, ADVANCED: 5, BASELINE: 2, TEMPLATE: 2, FEDREP: 2}
MODELS = {BASELINE: "model", FEDREP: "models"}  # the others: task
CONFIG: dict[str, dict[str, Any]] = {
    QUICKSTART: {"fraction-evaluate": 1.0},
    ADVANCED: {"fraction-train": 1.0, "fraction-evaluate": 1.0},
    BASELINE: {"algorithm-name": "FedAvg", "num-clients": 3, "fraction-evaluate": 1.0},
    TEMPLATE: {"fraction-train": 1.0},
    FEDREP: {
        "algorithm": "fedavg",
        "batch-size": BATCH,
        "num-local-epochs": 1,
        "fraction-fit": 1.0,
        "fraction-evaluate": 1.0,
    },
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
    (TEMPLATE, "fedbn"): (4, 0),
    (TEMPLATE, "fixbn"): (12, 7),
    (TEMPLATE, "fedtan"): (23, 9),
    (FEDREP, "fedbn"): (20, 1),
    (FEDREP, "fixbn"): (22, 2),
    (FEDREP, "fedtan"): (30, 3),
    ("moon", "fedbn"): (12, 0),
    ("moon", "fixbn"): (36, 22),
    ("moon", "fedtan"): (89, 48),
    ("heterofl", "fedbn"): (19, 2),
    ("heterofl", "fixbn"): (26, 9),
    ("heterofl", "fedtan"): (62, 17),
    ("pytorch-from-centralized-to-federated", "fedbn"): (19, 0),
    ("pytorch-from-centralized-to-federated", "fixbn"): (21, 1),
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
    TEMPLATE: lambda node: Local(node, 32, 3, "img"),
    FEDREP: lambda node: Local(node, 32, 3, "img"),
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
    if project == ADVANCED:
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
        folder = tmp_path / f"{project}-{len(list(tmp_path.iterdir()))}"
        package = PACKAGES[project]
        forget_projects()
        shutil.copytree(REPOSITORY / FOLDERS[project], folder)
        for diff in (DIFFS / f"{project}-{name}.diff" for name in ("port", *diffs)):
            if diff.is_file():
                subprocess.run(["git", "apply", str(diff)], cwd=folder, check=True)
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)
        wandb = ModuleType("wandb")
        wandb.init = wandb.log = lambda *args, **kwargs: None  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        names = ("client_app", "server_app", MODELS.get(project, "task"))
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
            model=model_of(project, modules[names[2]]),
            strategy=None,
            messages=[],
            first_steps=[],
        )
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

    yield run
    forget_projects()


def forget_projects() -> None:
    """Make the next import read a project's files, which were changed."""
    for name in list(sys.modules):
        if name.split(".")[0] in PACKAGES.values():
            del sys.modules[name]


def model_of(project: str, module: ModuleType) -> Callable[[], torch.nn.Module]:
    if project == FEDREP:
        return lambda: module.CNNCifar10ModelSplit(module.CNNCifar10())
    return module.CNNModel if project == BASELINE else module.Net


def watch(seen: SimpleNamespace, patch: pytest.MonkeyPatch) -> None:
    """Note our strategy, the messages of training, the model after the first step of
    each round, and the last model where the project does not write it.
    """
    configure, start, fit = Strategy.configure_train, Strategy.start, Server.fit
    call, step = ClientApp.__call__, Hooks.step

    def call_and_note(self: ClientApp, message: Message, context: Context) -> Message:
        sent = arrays_in(message)
        reply = call(self, message, context)
        if message.metadata.message_type == "train":
            seen.messages.append((sent, arrays_in(reply)))
        return reply

    @contextmanager
    def step_and_note(self: Hooks, batch_size: int) -> Iterator[None]:
        with step(self, batch_size):
            yield
        if self._passes == 1:
            seen.first_steps.append(from_record(to_record(self._model.state_dict())))

    def configure_and_note(self: Strategy, *args: Any) -> Any:
        seen.strategy = self
        return configure(self, *args)

    def start_and_note(self: Strategy, *args: Any, **kwargs: Any) -> Any:
        result = start(self, *args, **kwargs)
        seen.state = from_record(result.arrays)
        return result

    def fit_and_note(self: Server, num_rounds: int, timeout: float | None) -> Any:
        history = fit(self, num_rounds, timeout)
        seen.arrays = parameters_to_ndarrays(self.parameters)
        seen.state = dict(zip(seen.model().state_dict(), seen.arrays, strict=False))
        return history

    patch.setattr(ClientApp, "__call__", call_and_note)
    patch.setattr(Hooks, "step", step_and_note)
    patch.setattr(Strategy, "configure_train", configure_and_note)
    patch.setattr(Strategy, "start", start_and_note)
    patch.setattr(Server, "fit", fit_and_note)


def arrays_in(message: Message) -> dict[str, np.ndarray]:
    """Return copies of the model's entries that a message has, by their names; without
    them where Flower's own strategies send a list.
    """
    content = message.content
    names = None
    for record in content.config_records.values():
        names = json.loads(str(record.get("fedbn-flwr.array-names", "null"))) or names
    arrays = {}
    for record in content.array_records.values():
        for name, array in zip(names or record, record.values(), strict=True):
            arrays[name] = array.numpy().copy()
    return arrays


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
        names = json.loads(result[2]["fedbn-flwr.array-names"])
        head = {
            name: array
            for name, array in zip(names, result[0], strict=True)
            if name.startswith("fc2.")
        }
        if head:  # not in the exchanges of a step
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
@pytest.mark.parametrize("project", CLIENTS)
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


def entries_of(model: torch.nn.Module) -> tuple[set[str], set[str]]:
    """Return the names of BatchNorm's entries, and of the statistics among them."""
    entries = {
        f"{path}.{name}"
        for path, layer in model.named_modules()
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)
        for name in layer.state_dict()
    }
    return entries, {name for name in entries if ".running_" in name}


def largest_difference(
    some: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]
) -> float:
    assert some.keys() == others.keys()
    return max(
        float(np.abs(np.asarray(some[name], np.float64) - others[name]).max())
        for name in some
    )


@here
@pytest.mark.parametrize("project", FOLDERS)
def test_no_entry_of_batchnorm_is_sent_under_fedbn(found: Any, project: str) -> None:
    run = found(project, "model", "fedbn")
    bn, _ = entries_of(run.model())
    begun = len(SIZES)  # in the first round nodes get the whole model
    for i, (sent, replied) in enumerate(run.messages):
        assert i < begun or not bn & sent.keys()
        assert replied
        assert not bn & replied.keys()


@here
@pytest.mark.parametrize("project", FOLDERS)
def test_fixbn_changes_no_statistics_after_t_star(found: Any, project: str) -> None:
    run = found(project, "model", "fixbn", **{"num-server-rounds": 5})
    _, statistics = entries_of(run.model())
    frozen = run.messages[-2 * len(SIZES) :]  # T* is 2 or 3 of 5 rounds
    before = run.messages[0]
    last = {name: run.state[name] for name in statistics}
    for sent, replied in frozen:
        for arrays in (sent, replied):
            kept = {name: arrays[name] for name in statistics}
            assert largest_difference(kept, last) == 0.0
    assert any((before[1][name] != last[name]).any() for name in statistics)


@here
@pytest.mark.parametrize("project", FOLDERS)
def test_fedtans_first_step_has_the_statistics_of_the_pooled_batch(
    found: Any, monkeypatch: pytest.MonkeyPatch, project: str
) -> None:
    # Clients weigh by their examples, so a first batch has all of them.
    monkeypatch.setattr(sys.modules[__name__], "BATCH", max(SIZES))
    options = {"num-server-rounds": 1}
    if project == FEDREP:
        options["batch-size"] = BATCH
    run = found(project, "model", "fedtan", **options)
    model = seeded(run.model)()
    data = [DATA[project](node) for node in range(len(SIZES))]
    model.train()
    model(torch.cat([each.inputs for each in data]))
    _, statistics = entries_of(model)
    pooled = {name: model.state_dict()[name].numpy() for name in statistics}
    assert len(run.first_steps) == len(SIZES)
    for state in run.first_steps:
        ours = {name: state[name] for name in statistics}
        assert largest_difference(ours, pooled) <= 1e-6


@here
@pytest.mark.parametrize("project", FOLDERS)
def test_under_our_fedavg_a_project_has_its_own_numbers(
    found: Any, monkeypatch: pytest.MonkeyPatch, project: str
) -> None:
    # One round: training enlarges differences, and Adam's first step turns a gradient
    # that is nothing but rounding, of a bias before BatchNorm, into a whole step.
    once = {"num-server-rounds": 1}
    own = found(project, "model", **once).state
    monkeypatch.setattr(strategies, "FedBN", strategies.FedAvg)
    ours = found(project, "model", "fedbn", **once).state
    # Flower averages the counters of batches, too; ours are counts.
    for state in (own, ours):
        for name in [name for name in state if name.endswith("num_batches_tracked")]:
            del state[name]
    assert largest_difference(own, ours) <= 1e-6
