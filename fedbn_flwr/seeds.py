"""One seed, many named random streams.

Every draw of a run uses a generator that is named by its purpose and, if they matter,
by server round and partition id. Different draws never share a stream, and a stream
does not depend on the process or thread that uses it.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

__all__ = ["derive_seed", "numpy_generator", "torch_generator"]


def derive_seed(seed: int, purpose: str, *keys: int | str) -> int:
    """Return the 63-bit seed of the stream ``purpose``/``keys``."""
    # A hash of the names that is the same on every machine; Python's ``hash`` is not.
    name = "/".join([str(int(seed)), purpose, *map(str, keys)])
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def torch_generator(seed: int, purpose: str, *keys: int | str) -> torch.Generator:
    """Return a CPU ``torch.Generator`` for the stream, whose draws fit every device."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *keys))


def numpy_generator(seed: int, purpose: str, *keys: int | str) -> np.random.Generator:
    """Return a NumPy generator for the stream."""
    return np.random.default_rng(derive_seed(seed, purpose, *keys))
