"""Does a row of FixBN's Table 4 become faster on two cores, with the same bits?

    python benchmarks/rows.py --turns 1 --count 60 --write benchmarks/results.md    # five quiet minutes on two cores

Steps of ResNet-20 with random images in batches of 20, forward and backward, for the
norms of the rows: each way in processes of its own, in turns. The throughput is that of
the whole machine. The bits are those of the weights after the last step.
"""

from __future__ import annotations

import hashlib
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from fedtan_work import make_model
from measure import facts, in_turns, number, table, write_block
from torch import nn

from fedbn_flwr.norms import replace_norm
from fedbn_flwr.training.batches import set_memory_format
from fedbn_flwr.training.freezing import force_eval, layers_of

NORMS = ("batch", "frozen batch", "group+ws")
WAYS = {
    "one process, two threads": (1, 2, ""),
    "two processes, one thread each": (2, 1, ""),
    "contiguous": (1, 2, "contiguous"),
    "torch.compile": (1, 2, "compile"),
}
"""Processes, threads of each, and a change of the model."""
BITS: dict[tuple[str, str], set[str]] = {}


def steps(norm: str, threads: int, change: str, count: int) -> None:
    """Print the seconds of ``count`` steps, and a hash of the weights after them."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = make_model()
    if norm == "group+ws":
        model = replace_norm(model, norm)[0]
    model = set_memory_format(model).train()
    if norm == "frozen batch":
        for layer in layers_of(model).values():
            force_eval(layer)
    if change == "contiguous":
        model = model.to(memory_format=torch.contiguous_format)
    call = torch.compile(model) if change == "compile" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    inputs, targets = torch.randn(20, 3, 32, 32), torch.arange(20) % 2
    began = 0.0
    for step in range(count + 5):
        if step == 5:  # the first steps compile and fill the caches
            began = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(call(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    print(time.perf_counter() - began)
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.contiguous().numpy().tobytes())
    print(digest.hexdigest())


def throughput(norm: str, way: str, count: int) -> list[float]:
    """Return the steps a second of all processes of a way together."""
    processes, threads, change = WAYS[way]
    words = [sys.executable, __file__, "--norm", norm, "--threads", str(threads)]
    words += ["--change", change, "--count", str(count)]
    running = [
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    rate = 0.0
    for one in running:
        seconds, digest = one.communicate()[0].split()
        rate += count / float(seconds)
        BITS.setdefault((norm, way), set()).add(digest)
    return [rate]


def main(
    turns: int = 3,
    count: int = 150,
    write: Annotated[Path | None, typer.Option(help="Page of the table.")] = None,
    norm: str = "",
    threads: int = 1,
    change: str = "",
) -> None:
    """Measure all ways; with ``norm``, do the steps of one process."""
    if norm:
        return steps(norm, threads, change, count)
    first = next(iter(WAYS))
    rows = []
    for each in NORMS:
        ways = {way: partial(throughput, each, way, count) for way in WAYS}
        found = {k: statistics.median(v) for k, v in in_turns(ways, turns).items()}
        for way, rate in found.items():
            same = BITS[each, way] == BITS[each, first]
            ratio = number(rate / found[first])
            rows.append([each, way, number(rate), ratio, "yes" if same else "no"])
    made = table(["norm", "way", "steps a second", "ratio", "same bits"], rows)
    text = f"{made}\n\nTurns: {turns}; steps of a process: {count}. {facts()}"
    print(text)
    if write:
        write_block(write, "rows", text)
    return None


if __name__ == "__main__":
    typer.run(main)
