"""The number of messages, bytes, builds, passes, steps and copies is limited.

These tests notice lost speed without measuring seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from flwr.app import ArrayRecord, Context, Message
from torch import Tensor, nn

from fedbn_flwr import InProcessGrid, TorchClient, client_app
from fedbn_flwr.engines import in_process
from fedbn_flwr.messages import numpy_client, records
from fedbn_flwr.strategies import FedAvg, FedBN, FedTAN
from fedbn_flwr.training import (
    LearningRate,
    LocalTraining,
    loop,
)

SIZES = (6, 13, 9, 21)
ROUNDS, STEPS = 3, 2
passes: Counter[str] = Counter()


class Counting(nn.Sequential):
    """A network whose passes are counted, even in copies."""

    def forward(self, x: Tensor) -> Tensor:
        passes["training" if self.training else "test"] += 1
        result: Tensor = super().forward(x)
        return result


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of the functions that process a message."""
    counted: Counter[str] = Counter()

    def watch(owner: Any, name: str, key: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counted[key] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    watch(loop, "take_step", "steps")
    encode = numpy_client.to_record

    def to_record(entries: Mapping[str, Any]) -> ArrayRecord:
        counted["entries encoded by clients"] += len(entries)
        return encode(entries)

    monkeypatch.setattr(numpy_client, "to_record", to_record)
    watch(numpy_client, "decode", "entries copied from messages")
    real = in_process.stamped
    configs: dict[int, Any] = {}

    def stamped(message: Message, *ids: Any) -> Message:
        kind = message.metadata.message_type
        counted[kind] += 1
        config = message.content.get("config")
        counted["configs"] += id(config) not in configs and config is not None
        configs[id(config)] = config
        counted["bytes sent"] += sum(
            len(a.data)
            for r in message.content.array_records.values()
            for a in r.values()
        )
        return real(message, *ids)

    monkeypatch.setattr(in_process, "stamped", stamped)
    return counted


@pytest.mark.parametrize(
    ("method", "builds", "kept"),
    [(FedAvg, 1, 0), (FedBN, 1, 5), (FedTAN, 1, 0)],
    ids=["FedAvg", "FedBN", "FedTAN"],
)
def test_a_run_does_no_more_work_than_it_must(
    points, mlp, count, method, builds: int, kept: int
) -> None:
    datasets = [points(n, i) for i, n in enumerate(SIZES)]
    settings = LocalTraining(
        learning_rate=LearningRate(0.1), local_steps=STEPS, batch_size=4
    )
    passes.clear()

    def build() -> nn.Module:
        passes["builds"] += 1
        return Counting(*mlp())

    def client_fn(context: Context) -> TorchClient:
        own = datasets[context.node_config["partition-id"]]
        return TorchClient(build, own, own, settings, context=context)

    initial = records.to_record(mlp().state_dict())
    count.clear()
    app = client_app(
        client_fn,
        num_examples=lambda context: SIZES[context.node_config["partition-id"]],
    )
    with InProcessGrid(app, len(SIZES)) as grid:
        method().start(grid=grid, initial_arrays=initial, num_rounds=ROUNDS)
    messages = ROUNDS * len(SIZES)
    tried = 8 * (method is FedTAN)  # the query tries a synchronised step once
    assert (count["train"], count["evaluate"]) == (messages, messages)
    if method is not FedTAN:  # FedTAN's messages name the exchanges of their step
        assert count["configs"] == 2 * ROUNDS, "the messages of a round share one"
    assert count["query"] == (len(SIZES) if method is FedTAN else 0)
    assert passes["builds"] == builds
    assert passes["training"] == messages * STEPS + tried
    assert passes["test"] == messages
    assert count["steps"] == messages * STEPS
    whole = sum(len(array.data) for array in initial.values())
    own = sum(
        len(array.data) for name, array in initial.items() if name.startswith("1.")
    )
    first = len(SIZES) * whole  # FedBN's clients get the whole model once
    rest = (2 * messages - len(SIZES)) * (whole - (own if kept else 0))
    assert count["bytes sent"] == first + rest
    assert count["entries encoded by clients"] == messages * (len(initial) - kept)
    assert count["entries copied from messages"] == 0
