"""Rounds of FedTAN by any transport, in process, and the centralised steps they are held against."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Context
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.batchnorm.averaging import Array
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.messages.records import from_record, tensors, to_record
from fedbn_flwr.strategies import FedAvg
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.transport.polling_grid import PollingGrid

State = Mapping[str, Tensor]
RATE, DECAY = 0.1, 1e-2


@dataclass
class Batch:
    """A client's data."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        return self.inputs[positions], self.targets[positions]


def client_data(
    shape: Sequence[int], sizes: Sequence[int], *, classes: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64
) -> list[Batch]:
    """Data of clients that differ in offset and scale; the numbers of float32 and float64 are the same."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for i, size in enumerate(sizes):
        inputs = torch.randn(size, *shape, generator=g) * (1 + 0.3 * i) + 0.5 * i
        made.append(Batch(inputs.to(dtype), torch.randint(classes, (size,), generator=g)))
    return made


class Window(PollingGrid):
    """Sees a grid without the nodes ``hidden()`` (partition ids)."""

    def __init__(self, grid: InProcessGrid, hidden: Callable[[], Collection[int]]) -> None:
        super().__init__(grid)
        self.inner, self._hidden = grid, hidden

    def get_node_ids(self) -> list[int]:
        return [n for partition, n in enumerate(self.inner.get_node_ids()) if partition not in self._hidden()]


class BarrierWindow(Window):
    """The same, with the place where clients of one process meet."""

    def open_barrier(self, *args: Any) -> None:
        self.inner.open_barrier(*args)

    def close_barrier(self, *args: Any) -> None:
        self.inner.close_barrier(*args)


@dataclass
class Outcome:
    """A finished run: final state, the states before round 1 and after each, the strategy, and the time it took."""

    state: dict[str, Array]
    history: list[dict[str, Array]]
    strategy: Any
    grid: InProcessGrid
    seconds: float

    @property
    def tensors(self) -> State:
        return tensors(self.state)

    def why(self, partition: int, server_round: int = 1) -> str:
        """Why a partition was refused in a round."""
        return self.strategy.reports[server_round - 1].rejected[self.grid.get_node_ids()[partition]]


@pytest.fixture
def tan():
    """``tan(strategy, model, data, transport=..., hide={round: partitions}, ...)``: run; settings by name."""
    grids: list[InProcessGrid] = []

    def run(
        strategy: FedAvg,
        model: nn.Module,
        data: Sequence[Batch],
        *,
        transport: str = "barrier",
        rounds: int = 1,
        rate: LearningRate | float = RATE,
        hide: Mapping[int, Collection[int]] | None = None,
        client: type[TorchClient] = TorchClient,
        timeout: float = 30,
        seed: int = 7,
        **settings: Any,
    ) -> Outcome:
        rate = rate if isinstance(rate, LearningRate) else LearningRate(rate)
        training = LocalTraining(learning_rate=rate, **{"local_steps": 1, "batch_size": 0, **settings})

        def client_fn(context: Context) -> TorchClient:
            own = data[int(context.node_config["partition-id"])]
            return client(copy.deepcopy(model), own, own, training, context=context, seed=seed)

        # Over the channel and by messages all clients of a round must find a free place at the same time.
        grid = InProcessGrid(client_app(client_fn), len(data), max_workers=len(data))
        grids.append(grid)

        def hidden() -> Collection[int]:
            return (hide or {}).get(len(strategy.reports), ())

        seen = BarrierWindow(grid, hidden) if transport == "barrier" else Window(grid, hidden)
        strategy.parts = strategy.parts or split_state(model)
        history: list[dict[str, Array]] = []
        start = time.monotonic()
        result = strategy.start(
            grid=seen,
            initial_arrays=to_record(model.state_dict()),
            num_rounds=rounds,
            timeout=timeout,
            evaluate_fn=lambda _, arrays: history.append(from_record(arrays)),
        )
        return Outcome(from_record(result.arrays), history, strategy, grid, time.monotonic() - start)

    yield run
    for grid in grids:
        grid.close()


def centralised(model: nn.Module, data: Sequence[Batch], dtype: torch.dtype = torch.float64) -> State:
    """One plain torch step on the union of the clients' data."""
    model = copy.deepcopy(model).to(dtype).train()
    inputs = torch.cat([d.inputs for d in data]).to(dtype)
    F.cross_entropy(model(inputs), torch.cat([d.targets for d in data])).backward()
    torch.optim.SGD(model.parameters(), RATE, weight_decay=DECAY).step()
    return model.state_dict()


def distances(found: State, oracle: State, start: State) -> list[float]:
    """||found - oracle|| / ||oracle - start||, over parameters and over running statistics; counters must be equal."""
    for name, value in oracle.items():
        if not value.is_floating_point():
            assert torch.equal(found[name], value), name
    ratios = []
    for statistics in (False, True):
        names = [n for n, v in oracle.items() if v.is_floating_point() and ("running_" in n) == statistics]
        off, update = (
            torch.cat([(a[n].double() - b[n].double()).flatten() for n in names]).norm()
            for a, b in ((found, oracle), (oracle, start))
        )
        ratios.append(float(off / update))
    return ratios


class Branches(nn.Module):
    """Two branches with a BatchNorm each, another used twice, one without affine parameters, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3, bias=False)
        self.a, self.b = nn.BatchNorm2d(4, momentum=None), nn.BatchNorm2d(4, momentum=0.3, eps=1e-3)
        self.twice = nn.BatchNorm2d(4)
        self.plain = nn.BatchNorm2d(4, affine=False)
        self.frozen = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def train(self, mode: bool = True) -> Branches:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.a(self.left(x)).relu()) + self.twice(self.b(self.right(x)).tanh())
        return self.head((self.plain(x) + self.frozen(x * x)).tanh().mean((2, 3)))


def trained(model: nn.Module) -> nn.Module:
    """Float64, with gamma, beta and running statistics as after some training."""
    g = torch.Generator().manual_seed(4)
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            for name, value in [*layer.named_parameters(), *layer.named_buffers()]:
                if value.is_floating_point():
                    low = -1.0 if name in {"bias", "running_mean"} else 0.5
                    value.data.copy_(torch.empty_like(value).uniform_(low, 1.5, generator=g))
    return model.double()


@pytest.fixture(scope="session")
def lab() -> SimpleNamespace:
    return SimpleNamespace(
        Branches=Branches,
        RATE=RATE,
        DECAY=DECAY,
        centralised=centralised,
        client_data=client_data,
        distances=distances,
        trained=trained,
    )
