"""Noise that repeats."""

from __future__ import annotations

import pytest

from fedbn_flwr.privacy import differential
from fedbn_flwr.training.randomness import numpy_generator


def repeat_noise(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Let the protections draw noise with a seed, so that it protects nothing."""
    generator = numpy_generator(seed, "noise")
    monkeypatch.setattr(differential, "normal", generator.standard_normal)
