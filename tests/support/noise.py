"""Noise that repeats."""

from __future__ import annotations

from collections.abc import Sequence

from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.training.randomness import numpy_generator


class SeededNoise:
    """A source of noise with a seed that protects nothing."""

    secret = False

    def __init__(self, seed: int) -> None:
        self._generator = numpy_generator(seed, "noise")

    def normal(self, shape: Sequence[int]) -> Array:
        return self._generator.standard_normal(tuple(shape))
