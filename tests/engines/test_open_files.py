"""Sites that read from common open files have the bits of sites in memory.

The number of processes does not change a bit, whatever object has a file.
"""

from __future__ import annotations

import copy
import mmap
import os
import socket
import sqlite3
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fedbn_flwr.strategies import FedAvg
from fedbn_flwr.training import batches_of
from tests.support.fast import fast

SITES, ROWS = 3, 9
OF_MODULE = []
TABLE = np.random.default_rng(0).normal(size=(SITES * ROWS, 5))


class ByPosition:
    """The rows of anything with a position."""

    def __init__(self, file) -> None:
        self.file = file

    def __getitem__(self, row: str):
        self.file.seek(int(row) * TABLE[0].nbytes)
        time.sleep(1e-4)  # another process moves a common position now
        return np.frombuffer(self.file.read(TABLE[0].nbytes))


class Twice(ByPosition):
    """Moves the position by one descriptor, and reads by its copy."""

    def __init__(self, path: Path) -> None:
        self.file, self.copy = self, os.open(path, os.O_RDONLY)
        other = os.dup(self.copy)
        self.seek = lambda at: os.lseek(other, at, os.SEEK_SET)

    def read(self, size: int) -> bytes:
        return os.read(self.copy, size)


class Connection(dict):
    """Asks for rows at a connection that cannot be opened again."""

    def __init__(self) -> None:
        self.ends = socket.socketpair(type=socket.SOCK_DGRAM)

    def __missing__(self, row: str):
        self.ends[0].send(row.encode())
        time.sleep(1e-4)  # another process takes the answer now
        return TABLE[int(self.ends[1].recv(9))]


class Database(dict):
    def __init__(self, path: Path) -> None:
        self.base = sqlite3.connect(path, check_same_thread=False)
        self.base.execute("create table t (row text, bytes)")
        rows = [(str(row), values.tobytes()) for row, values in enumerate(TABLE)]
        self.base.executemany("insert into t values (?, ?)", rows)
        self.base.commit()

    def __missing__(self, row: str):
        found = self.base.execute("select bytes from t where row = ?", (row,))
        return np.frombuffer(*found.fetchone())


def opened(folder: Path) -> list:
    """Return one holder of an open file for each kind."""
    path = folder / "table"
    TABLE.tofile(path)
    np.savez(folder / "t.npz", **{str(n): row for n, row in enumerate(TABLE)})
    # Libraries use flags that would refuse the link in /proc.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    files = [file, memory, path.open("r+b", 0)]
    twice = Twice(path)
    path.unlink()
    archive = np.load(folder / "t.npz")
    return [*map(ByPosition, files), archive, Database(folder / "base"), twice]


class Rows(Dataset):
    """A site whose rows are read from all files. The files have other places."""

    of_class: Any

    def __init__(self, site: int, of_object: Any, of_closure: Any) -> None:
        self.first, self.inside = site * ROWS, {"deep": [of_object]}
        self.others = lambda: [of_closure, self.of_class, *OF_MODULE]

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        row = self.first + number
        found = [file[str(row)] for file in self.inside["deep"] + self.others()]
        # The bits of the row if each file gave this row.
        values = found[0] + sum(each - found[0] for each in found)
        return torch.from_numpy(values), row % 3


@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("seed", fast(range(2), 0))
def test_open_files_belong_to_one_process(
    federate,
    mlp,
    same_bits,
    tmp_path,
    monkeypatch,
    caplog,
    connected: bool,
    seed: int,
) -> None:
    files = [*opened(tmp_path), Connection()][: 6 + connected]
    Random(seed).shuffle(files)
    of_object, of_closure, of_class, *of_module = files
    monkeypatch.setattr(Rows, "of_class", of_class, raising=False)
    monkeypatch.setitem(globals(), "OF_MODULE", of_module)
    sites = [Rows(site, of_object, of_closure) for site in range(SITES)]

    def run(data: list, workers: int, rounds: int = 2, *begun: Any):
        strategy, model = begun or (FedAvg(), mlp)
        options = {"workers": workers}
        return federate(strategy, model, data, rounds=rounds, grid_options=options)

    rows = torch.arange(len(TABLE)).split(ROWS)
    kept = [TensorDataset(torch.from_numpy(TABLE)[site], site % 3) for site in rows]
    wanted = run(kept, 0)
    for workers in (0, SITES):
        same_bits(run(sites, workers).state, wanted.state)
    # Workers of a loader inherit the files from a process of the grid.
    loaded = [batches_of(DataLoader(site, num_workers=2)) for site in sites]
    same_bits(run(loaded, 2, 1).state, wanted.history[1])
    first, again, model = run(sites, 2, 1), FedAvg(), mlp()
    again.load_state_dict(first.strategy.state_dict(), 1)
    model.load_state_dict(first.tensors)
    resumed = run(sites, 2, 2, again, lambda: copy.deepcopy(model))
    same_bits(resumed.state, wanted.state)
    # With a connection, one process trains and reads.
    told = {one.module for one in caplog.records if one.levelname == "WARNING"}
    assert told == ({"in_process", "loaded"} if connected else set())
