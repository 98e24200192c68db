"""The number of messages, bytes, builds, passes, steps and copies is limited.

These tests notice lost speed without measuring seconds.
"""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from torch import nn

from fedbn_flwr import InProcessGrid, TorchClient, client_app
from fedbn_flwr.engines import in_process
from fedbn_flwr.lab.data import Samples, Subset
from fedbn_flwr.messages import numpy_client, records
from fedbn_flwr.strategies import FedAvg, FedBN, FedTAN
from fedbn_flwr.training import (
    LearningRate,
    LocalTraining,
    loop,
    model_state,
)

SIZES = (6, 13, 9, 21)
ROUNDS, STEPS = 3, 2


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
    [(FedAvg, 1, 0), (FedBN, 1, 5), (FedTAN, len(SIZES), 0)],
    ids=["FedAvg", "FedBN", "FedTAN"],
)
def test_a_run_does_no_more_work_than_it_must(
    points, mlp, count, method, builds: int, kept: int
) -> None:
    datasets = [points(n, i) for i, n in enumerate(SIZES)]
    settings = LocalTraining(
        learning_rate=LearningRate(0.1), local_steps=STEPS, batch_size=4
    )
    passes: Counter[str] = Counter()

    def build() -> nn.Module:
        passes["builds"] += 1
        model = mlp()
        model.register_forward_pre_hook(
            lambda module, args: passes.update(
                ["training" if module.training else "test"]
            )
        )
        return model

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
    tried = int(method is FedTAN)  # the query tries a synchronised step once
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


ROOT = Path(__file__).parents[1]
MODULE = nn.modules.module.__file__
_OF_MODULES = """
parameters named_parameters buffers named_buffers modules named_modules children named_children
state_dict train zero_grad
"""
WALKS = {getattr(nn.Module, name).__code__ for name in _OF_MODULES.split()} | {
    model_state._structure.__code__
}


def calls_and_walks(rounds: int, steps: int) -> tuple[int, int]:
    """Return the Python calls, and walks over modules, of a FedBN run.

    The run has 20 clients, and all threads count.
    """
    found: Counter[str] = Counter()

    def build() -> nn.Module:
        first = OrderedDict(
            flat=nn.Flatten(), fc=nn.Linear(16, 5), bn=nn.BatchNorm1d(5), act=nn.ReLU()
        )
        return nn.Sequential(
            OrderedDict(base=nn.Sequential(first), head=nn.Linear(5, 3))
        )

    pixels = torch.randint(
        256,
        (160, 1, 4, 4),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(0),
    )
    samples = Samples(pixels, torch.arange(160) % 3)
    settings = LocalTraining(
        learning_rate=LearningRate(0.1), local_steps=steps, batch_size=4
    )

    def client_fn(context: Context) -> TorchClient:
        first = 8 * int(context.node_config["partition-id"])
        own = Subset(samples, torch.arange(first, first + 8), mean=(0.1,), std=(0.3,))
        return TorchClient(build, own, own, settings, context=context)

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found["calls"] += 1
            outside = frame.f_back is None or frame.f_back.f_code.co_filename != MODULE
            found["walks"] += frame.f_code in WALKS and outside

    before = sys.getprofile()
    with InProcessGrid(client_app(client_fn), 20) as grid:
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            FedBN(fraction_evaluate=0.0).start(
                grid, records.to_record(build().state_dict()), num_rounds=rounds
            )
        finally:
            sys.setprofile(before)
            threading.setprofile(before)
    return found["calls"], found["walks"]


def of_later_rounds(steps: int) -> list[int]:
    """Return the calls and the walks of rounds 3 to 5."""
    few, more = calls_and_walks(2, steps), calls_and_walks(5, steps)
    return [count - first for count, first in zip(more, few, strict=True)]


def test_a_message_of_fedbn_takes_few_calls_and_walks_beside_its_steps(
    at_once: dict[str, str],
) -> None:
    """Count Python calls and module walks in the later rounds of a run.

    The server's work is included. The process is new, because the hooks and the garbage
    that other tests leave in a process make calls of their own.
    """
    run = subprocess.run(
        ["python", "-m", "tests.test_amount_of_work"],
        cwd=ROOT,
        env=at_once,
        check=True,
        capture_output=True,
        text=True,
    )
    (calls, walks), (with_step, _) = json.loads(run.stdout.splitlines()[-1])
    messages = 3 * 20
    beside_steps = calls - (with_step - calls)
    assert calls / messages <= 800
    assert beside_steps / messages <= 700
    assert walks / messages <= 3


if __name__ == "__main__":
    # calls for lines of the log are not counted
    logging.getLogger("flwr").setLevel(logging.ERROR)
    calls_and_walks(1, 1)  # imports and first measurements happen once
    gc.collect()
    gc.disable()
    print(json.dumps([of_later_rounds(1), of_later_rounds(2)]))
