"""Threads with a time limit, members of barriers, and certificates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.local_federation import make_certificates
from fedbn_flwr.transport import Dropped, Member, Reducer, RetryStep
from fedbn_flwr.transport.channel_server import ChannelServer
from fedbn_flwr.transport.grpc_channel import ChannelReducer

PATIENCE = 20


@pytest.fixture
def at_once() -> Iterator[Callable[..., list]]:
    """Provide ``at_once(f, g, ...)`` to call all functions in threads.

    It returns their results or exceptions in order.
    """
    pool = ThreadPoolExecutor(16)

    def run(*functions: Callable[[], Any]) -> list:
        futures = [pool.submit(function) for function in functions]
        return [future.exception(PATIENCE) or future.result() for future in futures]

    yield run
    pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def members() -> Callable[..., Mapping[int, Member]]:
    """Provide ``members(3, 5)`` to make members with 3 and 5 examples.

    The node ids are 100 and 101, and the batch sizes 2 and 3.
    """

    def make(*weights: float) -> Mapping[int, Member]:
        return {
            100 + i: Member(weight, 2 + i, f"node {100 + i}")
            for i, weight in enumerate(weights)
        }

    return make


@pytest.fixture
def steps() -> Callable:
    """Provide ``steps(reducer, tensors)`` to take a client's whole step.

    It repeats the step after RetryStep and returns (answers, union, attempts).
    """

    def run(reducer: Reducer, exchanges: Mapping):
        attempts = 0
        while True:
            attempts += 1
            try:
                union = reducer.begin()
                answers = {
                    tag: reducer.reduce(tag, tensor)
                    for tag, tensor in exchanges.items()
                }
            except RetryStep:
                continue
            except Dropped as error:
                return error
            reducer.close()
            return answers, union, attempts

    return run


@pytest.fixture
def server() -> Iterator[ChannelServer]:
    server = ChannelServer("127.0.0.1:0")
    yield server
    server.close()


@pytest.fixture
def honest(at_once, steps) -> Callable[[ChannelServer, Iterable[str]], list[float]]:
    """Provide ``honest(server, tokens)`` to return the members' answers.

    Members with the weights 1 and 3 send 0 and 4.
    """

    def run(server: ChannelServer, tokens: Iterable[str]) -> list[float]:
        calls = []
        for i, token in enumerate(tokens):
            reducer = ChannelReducer(server.address, token, server.certificate, 10)
            sent = {"gradients/0": torch.tensor([4.0 * i])}
            calls.append(partial(steps, reducer, sent))
        return [answers["gradients/0"].item() for answers, _, _ in at_once(*calls)]

    return run


@pytest.fixture
def tls_dir(tmp_path) -> Callable[[str], Path]:
    """Provide ``tls_dir(name)`` to make a CA, certificate and key for 127.0.0.1."""

    def make(name: str) -> Path:
        make_certificates(tmp_path / name, 1, ["127.0.0.1"])
        return tmp_path / name / "superlink"

    return make
