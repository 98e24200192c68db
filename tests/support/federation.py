"""The helpers that run a strategy over nodes of this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
)
from flwr.clientapp import ClientApp
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from torch import Tensor, nn

from fedbn_flwr import to_legacy
from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.client import TorchClient
from fedbn_flwr.client.kept import Folder, Memory, Store
from fedbn_flwr.compat.flower import copied_message
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import RunFailedError
from fedbn_flwr.messages.records import from_record, tensors, to_record
from fedbn_flwr.server.runs.round_report import RoundReport
from fedbn_flwr.strategies import Strategy
from fedbn_flwr.training import CLASSIFICATION, LocalTraining, Task
from fedbn_flwr.transport.polling_grid import PollingGrid
from tests.support.in_process import empty_context

SEED = 7
"""The seed of the clients of ``torch_clients``."""


ALONE = {"min_available_nodes": 1, "min_train_nodes": 1, "min_evaluate_nodes": 1}
"""The arguments of a strategy that works with one client."""


class RecordingGrid(PollingGrid):
    """A grid that keeps every sent message and every reply.

    It has no barrier, so FedTAN exchanges by messages. ``hidden()`` returns the
    partitions that the server does not see now.
    """

    def __init__(
        self,
        grid: InProcessGrid,
        hidden: Callable[[], Collection[int]],
    ) -> None:
        super().__init__(grid)
        self.inner = grid
        self.sent = []
        self.received = []
        self._hidden = hidden

    def get_node_ids(self) -> list[int]:
        hidden = self._hidden()
        return [
            node_id
            for partition, node_id in enumerate(self.inner.get_node_ids())
            if partition not in hidden
        ]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        batch = list(messages)
        replies = list(self.inner.send_and_receive(batch, timeout=timeout))
        self.sent += batch
        self.received += replies
        return replies

    def receive(
        self, messages: Iterable[Message], *, timeout: float | None
    ) -> Sequence[Message]:
        """Return copies, not in a list, so that the server may free their arrays."""
        replies = self.send_and_receive(messages, timeout=timeout)
        return tuple(copied_message(m) if m.has_content() else m for m in replies)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        batch = list(messages)
        self.sent += batch
        return super().push_messages(batch)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = list(super().pull_messages(message_ids))
        self.received += replies
        return replies

    def of(self, kind: str, replies: bool = False) -> list[Message]:
        """Return the messages of a type, or the replies to them."""
        found = self.received if replies else self.sent
        return [m for m in found if m.metadata.message_type == kind]

    def pairs(self) -> Iterator[tuple[Message, Message]]:
        """Return each training message with its reply."""
        return zip(self.of("train"), self.of("train", replies=True), strict=True)

    def config(self, message_type: str = "train") -> list[ConfigRecord]:
        """Return the configs of the messages of a type, in the order sent."""
        sent = self.of(message_type)
        return [record for m in sent for record in m.content.config_records.values()]

    def partition(self, node_id: int) -> int:
        """Return a node's partition id."""
        return self.inner.get_node_ids().index(node_id)


class RecordingBarrierGrid(RecordingGrid):
    """The same grid with a barrier for the waiting clients of one process."""

    def open_barrier(self, *args: Any) -> None:
        self.inner.open_barrier(*args)

    def close_barrier(self, *args: Any) -> None:
        self.inner.close_barrier(*args)


@dataclass
class Outcome:
    """A finished run."""

    state: dict[str, Array]
    """The final global state."""
    history: list[dict[str, Array]]
    """The global state before the first round and after each."""
    strategy: Any
    grid: RecordingGrid
    result: Any
    """What Flower's ``start`` returned."""
    error: RunFailedError | None = None
    """The error with which the run ended."""

    @property
    def reports(self) -> list[RoundReport]:
        """The report of each round."""
        return self.strategy.reports

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The final global state as tensors."""
        return tensors(self.state)

    def context(self, partition: int) -> Context:
        """Return the context of a client."""
        return self.grid.inner.context(partition)

    def local_state(self, partition: int) -> dict[str, Array]:
        """Return the local entries of a client."""
        return self.kept(partition)["fedbn-flwr.local"]

    def kept(self, partition: int) -> dict:
        """Return the whole local state of a client."""
        context, continuity = self.context(partition), self.strategy.continuity
        folder = context.node_config.get("state-dir")
        if folder and continuity:
            return newest(Folder(Path(folder), continuity.run, partition))
        return newest(Memory(context))

    def reason(self, partition: int, server_round: int = 1) -> str:
        """Return the reason of a client's rejection in a round."""
        node_id = self.grid.inner.get_node_ids()[partition]
        return self.reports[server_round - 1].rejected[node_id]


def newest(store: Store) -> dict:
    """Return the newest local state, or two empty records."""
    for name in store.names()[-1:]:
        return store.read(name)
    return {"fedbn-flwr.local": {}, "fedbn-flwr.rules": {}}


def run_strategy(
    grids: ExitStack,
    strategy: Strategy,
    app: ClientApp,
    start: Mapping,
    num_nodes: int,
    *,
    rounds: int = 3,
    barrier: bool = False,
    hide: Mapping[int, Collection[int]] | None = None,
    timeout: float = 60,
    train_config: Mapping | None = None,
    grid_options: Mapping | None = None,
    fails: type[RunFailedError] | None = None,
    evaluate_fn: Callable[[int], Mapping[str, float] | None] = lambda server_round: (
        None
    ),
) -> Outcome:
    """Run a strategy over nodes of this process.

    Args:
        grids: closes the grid. A test may have clients that hang until it ends: only
            then can a grid close.
        strategy: the strategy.
        app: the app of every node.
        start: the initial state as tensors, arrays, or a whole ArrayRecord.
        num_nodes: number of nodes.
        rounds: number of rounds.
        barrier: whether clients wait for each other at a barrier; otherwise FedTAN
            exchanges by messages.
        hide: the partitions that the server does not see, by round.
        timeout: seconds that a round waits for replies.
        train_config: the user's config of training.
        grid_options: further arguments of ``InProcessGrid``; by default one client
            computes at a time.
        fails: the error that ends the run; the outcome contains its result.
        evaluate_fn: the metrics of the server's test after a round.
    """
    inner = grids.enter_context(InProcessGrid(app, num_nodes, **(grid_options or {})))
    kind = RecordingBarrierGrid if barrier else RecordingGrid
    grid = kind(inner, lambda: (hide or {}).get(len(strategy.reports), ()))
    history = []

    def test(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        history.append(from_record(arrays))
        found = evaluate_fn(server_round)
        return None if found is None else MetricRecord(dict(found))

    with pytest.raises(fails) if fails else nullcontext() as caught:
        result = strategy.start(
            grid=grid,
            initial_arrays=(
                start if isinstance(start, ArrayRecord) else to_record(start)
            ),
            num_rounds=rounds,
            timeout=timeout,
            train_config=ConfigRecord(dict(train_config or {})),
            evaluate_fn=test,
        )
    error = caught.value if caught else None
    result = error.result if error else result
    return Outcome(
        from_record(result.arrays),
        history,
        strategy,
        grid,
        result,
        error,
    )


def torch_clients(
    model: Callable[[], nn.Module],
    datasets: Sequence,
    training: LocalTraining,
    *,
    client: type[TorchClient] = TorchClient,
    seed: int = SEED,
    task: Task = CLASSIFICATION,
    reuse_model: bool = False,
) -> Callable[[Context], TorchClient]:
    """Return a ``client_fn`` whose client i trains and tests on ``datasets[i]``."""

    def client_fn(context: Context) -> TorchClient:
        data = datasets[int(context.node_config["partition-id"])]
        return client(
            *(model(), data, data, training),
            context=context,
            seed=seed,
            task=task,
            reuse_model=reuse_model,
        )

    return client_fn


def run_rounds(legacy: Any, grid: Any, rounds: int) -> None:
    """Run a legacy strategy in Flower's legacy loop."""
    components = ServerAppComponents(
        strategy=legacy, config=ServerConfig(num_rounds=rounds)
    )
    ServerApp(server_fn=lambda _: components)(grid, empty_context())


@dataclass
class LegacyOutcome:
    """A finished run of Flower's legacy loop."""

    history: list[list[Array]]
    """The global arrays before the first round and after each."""
    evaluations: list
    """What the strategy returned for the evaluations of each round: the loss, and the
    metrics.
    """
    strategy: Strategy
    grid: InProcessGrid


def run_legacy_loop(
    grids: ExitStack,
    strategy: Any,
    app: ClientApp,
    start: Mapping,
    num_nodes: int,
    rounds: int,
    **options: Any,
) -> LegacyOutcome:
    """Run one of our strategies, or a legacy strategy, in Flower's legacy loop.

    ``options`` are arguments of ``to_legacy``.
    """
    history = []
    evaluations = []
    legacy = strategy
    if isinstance(strategy, Strategy):
        noted = lambda _, arrays, config: history.append(arrays)  # type: ignore[func-returns-value] # noqa: E731
        options = {"num_rounds": rounds, "timeout": 60, "evaluate_fn": noted, **options}
        legacy = to_legacy(strategy, to_record(start), **options)
    aggregate = legacy.aggregate_evaluate

    def watch(server_round: int, results: Any, failures: Any):
        evaluations.append(aggregate(server_round, results, failures))
        return evaluations[-1]

    legacy.aggregate_evaluate = watch
    grid = grids.enter_context(InProcessGrid(app, num_nodes))
    run_rounds(legacy, grid, rounds)
    return LegacyOutcome(history, evaluations, strategy, grid)
