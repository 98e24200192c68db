"""Rows and images of a test as own data of a run."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

_NUMBERS = itertools.count()


def named(monkeypatch: pytest.MonkeyPatch, function: Callable) -> str:
    """Return ``module:rows`` for a function, in a new module of this test."""
    module = ModuleType(f"table_{next(_NUMBERS)}")
    module.rows = function
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return f"{module.__name__}:rows"


def generator_of(site: int, part: str) -> torch.Generator:
    """Return the generator of a part of a site's data."""
    return torch.Generator().manual_seed(2 * site + (part == "test"))


class Pairs:
    """A data set of pairs, as users write it. Further arguments are attributes."""

    def __init__(self, inputs: Any, of_each: Any, /, **more: Any) -> None:
        self.inputs, self.of_each = inputs, of_each
        self.reads = 0
        vars(self).update(more)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, at: int):
        self.reads += 1
        return self.inputs[at], self.of_each[at]


def table(
    monkeypatch: pytest.MonkeyPatch,
    x: Any,
    y: Any = None,
    client: Sequence | None = None,
    split: Any = None,
    group: Any = None,
) -> str:
    """Return the ``dataset`` of rows, from a function of a module of this test.

    Args:
        monkeypatch: forgets the module after the test.
        x: inputs, (N, ...).
        y: targets, (N,) or (N, K); None without targets.
        client: the site of each row; None for a single site.
        split: whether each row is a test example; by default, every fifth row is.
        group: the patient of each row.
    """
    inputs = torch.from_numpy(np.asarray(x, np.float32))
    clients = np.zeros(len(inputs), int) if client is None else np.asarray(client)
    tests = np.arange(len(inputs)) % 5 == 4 if split is None else np.asarray(split)
    names = sorted({str(name) for name in clients.tolist()})

    def rows(site: int, part: str) -> TensorDataset:
        own = (clients.astype(str) == names[site]) & (tests == (part == "test"))
        if y is None:
            return TensorDataset(inputs[own])
        data = TensorDataset(inputs[own], torch.from_numpy(np.asarray(y)[own]))
        if group is not None:
            data.groups = np.asarray(group)[own].tolist()
        return data

    # A run may take fewer sites than the table has.
    rows.site_names = names if client is not None else None
    return named(monkeypatch, rows)


def targets_of_tasks(x: np.ndarray) -> dict[str, np.ndarray]:
    """Return targets of the rows for each task of a table."""
    return {
        "binary": (x[:, 0] > 0).astype(int),
        "classification": np.arange(len(x)) % 3,
        "multi-label": (x[:, :3] > 0).astype(int),
        "regression": x[:, :2] * 2,
    }


def in_places(count: int, *places: str) -> dict[str, int]:
    """Return folders of two classes in these places, with ``count`` images in each."""
    return {f"{place}/{label}": count for place in places for label in ("cat", "dog")}


def write_images(
    root: Path, folders: Mapping[str, int], size: tuple[int, int] = (6, 4)
) -> str:
    """Write images into folders below ``root``, and return the run's dataset."""
    for number, (folder, count) in enumerate(folders.items()):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for at in range(count):
            draw = np.random.default_rng(100 * number + at)
            pixels = draw.integers(0, 256, (*size[::-1], 3)).astype(np.uint8)
            Image.fromarray(pixels).save(root / folder / f"{at}.png")
    return f"folder:{root}"
