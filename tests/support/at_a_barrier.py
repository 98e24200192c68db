"""A synchronised step of clients that are threads at a barrier."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedbn_flwr.batchnorm.sync import combine, synchronised
from fedbn_flwr.batchnorm.sync.reduction import refuse_unusable
from tests.support.synchronised import Batch, Loss, State, client_data, sgd_step


class Barrier:
    """A server whose last client combines the tensors for all clients."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = list(weights)
        self.slots = [("", torch.empty(0))] * len(self.weights)
        self.log = []
        self.barrier = threading.Barrier(len(self.weights), self.answer, timeout=30)

    def answer(self) -> None:
        tags, tensors = zip(*self.slots, strict=True)
        (tag,) = {*tags}  # all clients meet with one tag
        for tensor in tensors:
            refuse_unusable(tag, tensor)
        self.result = combine(tag, tensors, self.weights)
        self.log.append((tag, self.result.shape, self.result.dtype))

    def reduce(self, client: int, tag: str, tensor: Tensor) -> Tensor:
        self.slots[client] = (tag, tensor)
        self.barrier.wait()
        return self.result


def federated(
    model: nn.Module,
    batches: Sequence[Batch],
    weights: Sequence[float],
    *,
    loss: Loss = functional.cross_entropy,
    barrier: Barrier | None = None,
    autocast: bool = False,
    **options: str,
) -> State:
    """Return the average of the clients' models after one step."""
    barrier = barrier or Barrier(weights)
    union = sum(len(x) for x, _ in batches)
    models = [copy.deepcopy(model) for _ in batches]
    failures = []

    def client(i: int) -> None:
        x, target = batches[i]
        reduce = functools.partial(barrier.reduce, i)
        try:
            with synchronised(
                models[i], reduce, batch_size=len(x), union_batch_size=union, **options
            ):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    value = loss(models[i](x), target)
                value.backward()
            sgd_step(models[i])
        except BaseException as error:
            failures.append(error)
            barrier.barrier.abort()

    threads = [threading.Thread(target=client, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    # The first cause comes first. A broken barrier is only its effect on other clients.
    failures.sort(key=lambda e: isinstance(e, threading.BrokenBarrierError))
    if failures:
        raise failures[0]
    return average([m.state_dict() for m in models], weights)


def average(states: Sequence[State], weights: Sequence[float]) -> State:
    shares, result = torch.tensor(weights).double() / sum(weights), {}
    for name in states[0]:
        values = torch.stack([state[name] for state in states])
        if values.is_floating_point():
            result[name] = torch.tensordot(shares, values.double(), 1)
        else:
            result[name] = values.max(0).values
    return result


def client_batches(shape: Sequence[int], sizes: Sequence[int]) -> list[Batch]:
    """Return float64 batches of clients that differ in offset and scale."""
    return [(one.inputs, one.targets) for one in client_data(shape, sizes)]
