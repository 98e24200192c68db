"""The bare torch loop: what people write without a framework, in one process or in
several.

Index a batch, ``zero_grad``, ``backward``, ``SGD.step``; tensors in the plain,
contiguous format unless the variant is ``channels-last``. With several processes each
trains every n-th client of a round. The global state, the sums and what the clients
keep lie in shared memory; each process sums its own clients' states.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peers.work import (
    Clock,
    Job,
    Setting,
    accuracy,
    contend,
    count_correct,
    load_data,
    local_names,
    make_model,
)
from torch import Tensor, nn

State = dict[str, Tensor]
Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass
class Shared:
    """What the processes share: the global state, a sum for each process, the clients'
    own entries.
    """

    state: State
    sums: list[State]
    kept: list[State]


def train(model: nn.Module, batches: Batches, setting: Setting) -> None:
    """Train as one client does in one round."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), setting.learning_rate)
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def indexed(inputs: Tensor, targets: Tensor, setting: Setting) -> Batches:
    """Yield the batches of a round."""
    if setting.local_steps:
        order: Sequence[Tensor] = [
            torch.randint(len(inputs), (setting.batch,))
            for _ in range(setting.local_steps)
        ]
    else:
        order = torch.split(torch.randperm(len(inputs)), setting.batch)
    for batch in order:
        yield inputs[batch], targets[batch]


def work(
    job: Job, shared: Shared, model: nn.Module, clients: Sequence[int], worker: int
) -> None:
    """Train some clients of a round and sum their states."""
    setting, data = job.work, load_data(job.data, job.work.dataset)
    own = set(shared.kept[0])
    for entry in shared.sums[worker].values():
        entry.zero_()
    for client in clients:
        model.load_state_dict(
            {**shared.state, **shared.kept[client if setting.personal else 0]}
        )
        inputs, targets = data.client(client, setting.examples)
        if job.variant == "channels-last":
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        batches: Batches = indexed(inputs, targets, setting)
        if setting.source:
            from peers.sources import client_loader

            batches = client_loader(job, client)
        train(model, batches, setting)
        for name, entry in model.state_dict().items():
            if name in own:
                shared.kept[client][name].copy_(entry)
            else:
                shared.sums[worker][name] += entry


def average(shared: Shared, count: int) -> None:
    """Make the mean of so many clients the global state."""
    for name, entry in shared.state.items():
        entry.copy_(torch.stack([sums[name] for sums in shared.sums]).sum(0) / count)


def new_model(job: Job) -> nn.Module:
    """Return the model in the variant's memory format."""
    model = make_model(job.work.model)
    return (
        model.to(memory_format=torch.channels_last)
        if job.variant == "channels-last"
        else model
    )


def chosen(setting: Setting, server_round: int) -> list[int]:
    """Return the clients of a round."""
    order = torch.randperm(
        setting.clients, generator=torch.Generator().manual_seed(server_round)
    )
    return (
        order[: setting.a_round].tolist()
        if setting.a_round < setting.clients
        else list(range(setting.clients))
    )


def worker_loop(job: Job, shared: Shared, barrier: Any, worker: int) -> None:
    """Train this process's clients of each round, between two barriers."""
    torch.set_num_threads(1)
    model = new_model(job)
    for server_round in range(job.rounds + 1):
        barrier.wait()
        work(
            job,
            shared,
            model,
            chosen(job.work, server_round)[worker :: job.workers],
            worker,
        )
        barrier.wait()


def evaluate(job: Job, clock: Clock, model: nn.Module, shared: Shared) -> float:
    """Evaluate the model of each client on all test images."""
    data = load_data(job.data, job.work.dataset)
    correct = 0
    for _ in range(job.rounds + 1):
        clock.begin()
        correct = 0
        for kept in shared.kept:
            model.load_state_dict({**shared.state, **kept})
            correct += count_correct(model, data.test_inputs, data.test_targets)
        clock.lap()
    return correct / (len(data.test_targets) * len(shared.kept))


def _zeros(entries: State) -> State:
    return {name: torch.zeros_like(entry) for name, entry in entries.items()}


def _copy(entries: State) -> State:
    return {name: entry.clone() for name, entry in entries.items()}


def main(job: Job, clock: Clock) -> float:
    """Do the rounds."""
    setting, data = job.work, load_data(job.data, job.work.dataset)
    model = new_model(job)
    own = local_names(model) if setting.personal else set()
    whole = {name: entry.clone() for name, entry in model.state_dict().items()}
    state = {name: entry for name, entry in whole.items() if name not in own}
    num_kept = setting.clients if own else 1
    kept = {name: whole[name] for name in own}
    shared = Shared(
        state,
        [_zeros(state) for _ in range(job.workers)],
        [_copy(kept) for _ in range(num_kept)],
    )
    if setting.evaluate:
        work(job, shared, model, range(setting.clients), 0)
        average(shared, setting.clients)
        return evaluate(job, clock, model, shared)
    for part in (shared.state, *shared.sums, *shared.kept):
        for entry in part.values():
            entry.share_memory_()  # type: ignore[no-untyped-call]
    context = torch.multiprocessing.get_context("spawn")
    barrier = context.Barrier(job.workers)
    others = [
        context.Process(target=worker_loop, args=(job, shared, barrier, worker))
        for worker in range(1, job.workers)
    ]
    for process in others:
        process.start()
    for server_round in range(job.rounds + 1):
        clients = chosen(setting, server_round)
        barrier.wait()
        work(job, shared, model, clients[:: job.workers], 0)
        barrier.wait()
        average(shared, len(clients))
        clock.lap()
    for process in others:
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)
    found = []
    for kept in shared.kept:
        model.load_state_dict({**shared.state, **kept})
        found.append(accuracy(model, data))
    return sum(found) / len(found)


if __name__ == "__main__":
    from peers import bare

    contend(bare.main)
