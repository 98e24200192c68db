"""Torch's generators that nobody can repeat, drawn from a source of noise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from fedbn_flwr.privacy.noise import Noise
from fedbn_flwr.training.randomness import seeded

__all__ = ["drawing_from", "generator_from"]

_STATE = slice(24, 24 + 624 * 8)  # of torch's generator on the CPU: the words of the Mersenne Twister


def generator_from(noise: Noise) -> torch.Generator:
    """Return a generator on the CPU, drawn from the noise.

    All of its state is drawn, because torch keeps 32 bits of a seed there, and these can be searched.
    """
    generator = torch.Generator()
    state = generator.manual_seed(int(noise.uniform(1)[0] * 2**53)).get_state()
    words = state[_STATE].view(torch.int64)
    words.copy_(torch.from_numpy((noise.uniform(len(words)) * 2**32).astype(np.int64)))
    generator.set_state(state)
    return generator


@contextmanager
def drawing_from(noise: Noise) -> Iterator[None]:
    """Draw from such a generator in the block: the default one on the CPU; on CUDA the seed has 53 bits."""
    generator = generator_from(noise)
    with seeded(generator.initial_seed()):
        torch.default_generator.set_state(generator.get_state())
        yield
