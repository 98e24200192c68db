"""Weights that repeat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def with_seed(seed: int = 0) -> Iterator[None]:
    """Seed torch in a block or a function, and restore its generator."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
