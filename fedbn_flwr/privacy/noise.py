"""Gaussian noise from the operating system's entropy.

A run's seed is in its config. Anybody who knows the seed could compute noise from it
and subtract the noise. Therefore the noise comes from ChaCha20 with a fresh key for
each draw, and no run repeats it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from fedbn_flwr.batchnorm.array_types import Array

_BLOCK = 2**20  # values that are computed together


def keystream(key: bytes, num_bytes: int) -> bytes:
    """Return the first bytes of ChaCha20's stream for a key of 32 bytes.

    Never use a key for another stream, because the nonce is always zero.
    """
    cipher = Cipher(ChaCha20(key, bytes(16)), mode=None)
    return cipher.encryptor().update(bytes(num_bytes))


def normal(shape: Sequence[int]) -> Array:
    """Return standard normal values in float64, with a fresh key (Box and Muller 1958).

    No absolute value is above 8.6.
    """
    values = np.empty(int(np.prod(shape)))
    # Compute blocks, because they need less memory.
    for start in range(0, values.size, _BLOCK):
        block = values[start : start + _BLOCK]
        pairs = (block.size + 1) // 2
        first, second = _uniform(2 * pairs).reshape(2, pairs)
        # Use (0, 1] instead of [0, 1), because the logarithm of 0 is infinite.
        radius = np.sqrt(-2 * np.log(first + 2.0**-53))
        angle = 2 * np.pi * second
        block[:pairs] = radius * np.cos(angle)
        block[pairs:] = (radius * np.sin(angle))[: block.size - pairs]
    return values.reshape(shape)


def _uniform(size: int) -> Array:
    """Return values in [0, 1), multiples of 2^-53, in float64."""
    words = np.frombuffer(keystream(os.urandom(32), 8 * size), np.uint64)
    # Keep the 53 bits that float64 represents without rounding.
    return (words >> np.uint64(11)) * 2.0**-53
