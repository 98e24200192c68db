"""Fixtures of all tests: toy data, a tiny model in float64, and a federation whose messages can be looked into."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before Flower is imported anywhere: no telemetry, no look at the network, no file in the user's home.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
if "FLWR_HOME" not in os.environ:
    os.environ["FLWR_HOME"] = tempfile.mkdtemp(prefix="flwr-home-")
    atexit.register(shutil.rmtree, os.environ["FLWR_HOME"], ignore_errors=True)

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from PIL import Image
from torch import Tensor, nn
from torchvision.models.shufflenetv2 import ShuffleNetV2

from fedbn_flwr.batchnorm.averaging import Array
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.norms import replace_norm
from fedbn_flwr.strategies import FedAvg
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.transport.polling_grid import PollingGrid


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


def processes_of(folder: Path) -> list[str]:
    """Command lines of the running processes that know the folder by argument or environment, this one left out."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                known = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
                state = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:  # it ended meanwhile
                continue
            if str(folder).encode() in known and state != "Z":
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@pytest.fixture(scope="session")
def await_end() -> Callable[[Path], list[str]]:
    """``await_end(folder)``: the processes that know the folder and are still there after 15 seconds."""

    def do(folder: Path) -> list[str]:
        deadline = time.monotonic() + 15  # on a busy machine a killed process takes a moment to be gone
        while (left := processes_of(folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    return do


@dataclass
class Points:
    """Labelled points in memory; ``asked`` collects the positions of every batch."""

    inputs: Tensor
    targets: Tensor
    asked: list[list[int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        self.asked.append(positions.tolist())
        return self.inputs[positions], self.targets[positions]


MakePoints = Callable[..., Points]


@pytest.fixture
def points() -> MakePoints:
    """``points(n, seed, shape=(5,), classes=3)``: n random points, shifted and scaled by client so clients differ."""

    def make(num_examples: int, seed: int = 0, shape: tuple[int, ...] = (5,), classes: int = 3) -> Points:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(num_examples, *shape, generator=generator, dtype=torch.float64) * (1 + 0.3 * seed) + seed
        return Points(inputs, torch.randint(classes, (num_examples,), generator=generator))

    return make


WriteCityscapes = Callable[[Path, Mapping[str, int], Mapping[str, int], tuple[int, int]], Path]


@pytest.fixture(scope="session")
def write_cityscapes() -> WriteCityscapes:
    """``write_cityscapes(folder, train, val, size)``: images of (height, width) in Cityscapes' layout, per city.

    The red value of a pixel is its label id, drawn at random in 4 by 4 blocks of the image.
    """

    def write(folder: Path, train: Mapping[str, int], val: Mapping[str, int], size: tuple[int, int]) -> Path:
        cities = [("train", city, n) for city, n in train.items()] + [("val", city, n) for city, n in val.items()]
        for part, city, number in ((part, city, i) for part, city, count in cities for i in range(count)):
            ids = np.random.default_rng(number).integers(0, 34, (4, 4)).astype(np.uint8)
            ids = np.kron(ids, np.ones((size[0] // 4, size[1] // 4), np.uint8))
            ids[0, 0] = 255  # the licence plate's -1, as a byte
            name, root = f"{city}_{number:06}_000019", folder / "cityscapes"
            image = np.stack([ids, 0 * ids, 0 * ids], axis=2)
            files = (("leftImg8bit", "", image), ("gtFine", "_labelIds", ids), ("gtFine", "_instanceIds", ids + 1))
            for kind, suffix, array in files:
                path = root / kind / part / city / f"{name}_{kind}{suffix}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(path)
        return folder

    return write


MakeModel = Callable[..., nn.Module]


@pytest.fixture
def mlp() -> MakeModel:
    """``mlp(norm=True, dropout=0.0)``: 5-4-3 with one BatchNorm1d, float64, the same weights every time."""

    def make(norm: bool = True, dropout: float = 0.0, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = [nn.Linear(5, 4), *([nn.BatchNorm1d(4)] if norm else []), nn.ReLU()]
            return nn.Sequential(*layers, *([nn.Dropout(dropout)] if dropout else []), nn.Linear(4, 3)).double()

    return make


@pytest.fixture
def torchvision_net() -> MakeModel:
    """``torchvision_net(norm=True)``: a narrow ShuffleNetV2, or one without BatchNorm; 3 classes, always the same."""

    def make(norm: bool = True) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = ShuffleNetV2([2, 1, 1], [8, 16, 16, 32, 32], num_classes=3).double()
            return model if norm else replace_norm(model, "wsconv")[0]

    return make


class Recorder(PollingGrid):
    """Keeps every message sent, by type and node, and every reply."""

    def __init__(self, grid: InProcessGrid, backwards: bool = False) -> None:
        super().__init__(grid)
        self.inner = grid
        self.backwards = backwards
        self.sent: list[Message] = []
        self.received: list[Message] = []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        batch = list(messages)
        replies = list(self.inner.send_and_receive(batch, timeout=timeout))
        self.sent += batch
        self.received += replies
        return replies[::-1] if self.backwards else replies

    def config(self, message_type: str = "train") -> list[ConfigRecord]:
        """Return the configs of the messages of a type, in the order sent."""
        sent = [m for m in self.sent if m.metadata.message_type == message_type]
        return [record for m in sent for record in m.content.config_records.values()]

    def partition(self, node_id: int) -> int:
        """Return a node's partition id."""
        return list(self.inner.get_node_ids()).index(node_id)


@dataclass
class Outcome:
    """A finished run."""

    state: dict[str, Array]
    strategy: FedAvg
    grid: Recorder
    result: Any
    history: list[dict[str, Array]]
    """The global state before round 1 and after each round."""


Federate = Callable[..., Outcome]


@pytest.fixture
def federate() -> Iterator[Federate]:
    """``federate(strategy, model, datasets, ...)``: run a strategy over TorchClients in process.

    ``backwards``: replies arrive in reverse order.
    """
    grids: list[InProcessGrid] = []

    def run(
        strategy: FedAvg,
        model: Callable[[], nn.Module],
        datasets: Sequence[Any],
        *,
        rounds: int = 3,
        rate: float = 0.1,
        wrap: Callable[[Callable[[Context], Any]], ClientApp] = client_app,
        client: type[TorchClient] = TorchClient,
        grid_options: Mapping[str, Any] | None = None,
        timeout: float = 60,
        backwards: bool = False,
        **settings: Any,
    ) -> Outcome:
        training = LocalTraining(learning_rate=LearningRate(rate), **{"batch_size": 4, **settings})

        def client_fn(context: Context) -> TorchClient:
            data = datasets[int(context.node_config["partition-id"])]
            return client(model(), data, data, training, context=context, seed=7)

        options = {"max_workers": 1, **(grid_options or {})}
        inner = InProcessGrid(wrap(client_fn), len(datasets), **options)
        grids.append(inner)
        grid = Recorder(inner, backwards)
        history: list[dict[str, Array]] = []
        if strategy.parts is None:
            strategy.parts = split_state(model())
        result = strategy.start(
            grid=grid,
            initial_arrays=to_record(model().state_dict()),
            num_rounds=rounds,
            timeout=timeout,
            evaluate_fn=lambda _, arrays: history.append(from_record(arrays)),
        )
        return Outcome(from_record(result.arrays), strategy, grid, result, history)

    yield run
    for grid in grids:
        grid.close()


SameRun = Callable[[Mapping[str, Any], Mapping[str, Any]], None]


@pytest.fixture(scope="session")
def same_run() -> SameRun:
    """``same_run(a, b)``: two summaries tell of the same final state, to the bit, and of the same traffic.

    The server's test of that state may differ in a float32's last digit: another process, other numbers of threads.
    """

    def check(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
        for key in ("sha256", "ledger", "rejected"):
            assert a[key] == b[key], key
        for key in ("final", "best"):
            assert a[key] == pytest.approx(b[key], rel=1e-6), key

    return check


SameBits = Callable[[Mapping[str, Array], Mapping[str, Array]], None]


@pytest.fixture
def same_bits() -> SameBits:
    """``same_bits(a, b)``: two states have the same names in the same order, dtypes, shapes and bits."""

    def check(a: Mapping[str, Array], b: Mapping[str, Array]) -> None:
        assert list(a) == list(b)
        for name in a:
            assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
            assert np.asarray(a[name]).tobytes() == np.asarray(b[name]).tobytes(), name

    return check
