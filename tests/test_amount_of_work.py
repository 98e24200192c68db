"""The number of messages, bytes, builds, passes, steps and copies is limited.

These tests notice lost speed without measuring seconds.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message
from torch import Tensor, nn

from fedbn_flwr import InProcessGrid, client_app
from fedbn_flwr.engines import in_process
from fedbn_flwr.messages import numpy_client, records
from fedbn_flwr.strategies import FedAvg, FedBN, FedTAN
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.training.client_hook import Session
from tests.support.federation import torch_clients

SIZES = (6, 13, 9, 21)
ROUNDS, STEPS = 3, 2
counted = Counter()
lock = threading.Lock()


def add(key: str, number: int = 1) -> None:
    """Count under a lock, because clients of a synchronised step are threads."""
    with lock:
        counted[key] += number


class Counting(nn.Sequential):
    """A network whose passes are counted, even in copies."""

    def forward(self, x: Tensor) -> Tensor:
        add("training" if self.training else "test")
        return super().forward(x)


@pytest.fixture(autouse=True)
def _counted(monkeypatch) -> None:
    """Count the calls of the functions that process a message."""

    def watch(owner: Any, name: str, note: Callable[..., None]) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any):
            note(*args)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    def note_sent(message: Message, **_: Any) -> None:
        add(message.metadata.message_type)
        for record in message.content.array_records.values():
            add("bytes sent", sum(len(array.data) for array in record.values()))

    counted.clear()
    watch(Session, "change_gradients", lambda *_: add("steps"))
    watch(numpy_client, "to_record", lambda entries: add("encoded", len(entries)))
    watch(numpy_client, "decode", lambda *_: add("decoded"))
    watch(in_process, "changed", note_sent)
    watch(ConfigRecord, "__init__", lambda *_: add("checked configs"))


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(
    ("method", "kept"),
    # No member is late, however busy the machine is.
    [(FedAvg, 0), (FedBN, 5), (partial(FedTAN, fedtan_timeout=3600.0), 0)],
    ids=["FedAvg", "FedBN", "FedTAN"],
)
def test_a_run_does_no_more_work_than_it_must(
    datasets, mlp, method, kept: int, reuse: bool
) -> None:
    settings = LocalTraining(
        learning_rate=LearningRate(0.1), local_steps=STEPS, batch_size=4
    )

    def build() -> nn.Module:
        add("builds")
        return Counting(*mlp())

    initial = records.to_record(mlp().state_dict())
    app = client_app(
        torch_clients(lambda: build, datasets, settings, reuse_model=reuse),
        num_examples=lambda context: SIZES[context.node_config["partition-id"]],
    )
    with InProcessGrid(app, len(SIZES)) as grid:
        method().start(grid=grid, initial_arrays=initial, num_rounds=ROUNDS)
    synchronised = method not in (FedAvg, FedBN)
    messages = ROUNDS * len(SIZES)
    queries = len(SIZES) * synchronised
    if not synchronised:  # FedTAN's messages name the exchanges of their step
        # Three at the start; then the messages of each half have one.
        assert counted["checked configs"] == 3 + 2 * ROUNDS
    whole = sum(len(array.data) for array in initial.values())
    own = sum(
        len(array.data) for name, array in initial.items() if name.startswith("1.")
    )
    first = len(SIZES) * whole  # FedBN's clients get the whole model once
    rest = (2 * messages - len(SIZES)) * (whole - (own if kept else 0))
    assert dict(counted) == {
        "train": messages,
        "evaluate": messages,
        **({"query": queries} if synchronised else {}),
        "checked configs": counted["checked configs"],
        "builds": counted["builds"],
        # the query tries a synchronised step once
        "training": messages * STEPS + 2 * queries,
        "test": messages,
        "steps": messages * STEPS,
        "bytes sent": first + rest,
        "encoded": messages * (len(initial) - kept),
    }
    # A model is built for each message, or reused by clients that do not work at once.
    at_once = len(SIZES) if synchronised else 1
    least, most = (1, at_once) if reuse else [2 * messages + queries] * 2
    assert least <= counted["builds"] <= most
