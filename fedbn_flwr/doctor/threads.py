"""The number of torch's threads, for a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["threads"]


@contextmanager
def threads(count: int = 1) -> Iterator[None]:
    """Let torch use so many threads in the block.

    One is faster where operations are small and many, or where the caller has threads of its own.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
