"""Fixtures of the harness, with runs on digits that take a fraction of a second."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.runs.run import run
from tests.support.runs import QUICK


@pytest.fixture
def quick_config() -> Callable:
    """Provide ``quick_config(strategy="fedbn", **{"kebab-key": value})``.

    Its run has 3 clients and 2 rounds of 2 steps on digits.
    """

    def make(**settings) -> Config:
        return Config.make({**QUICK, **settings})

    return make


@pytest.fixture
def quick_run(tmp_path, quick_config) -> Callable:
    """Provide ``quick_run(strategy="fedbn", ...)`` to run in a folder of the test.

    It returns the summary and the folder.
    """
    numbers = itertools.count(1)

    def make(**settings) -> tuple[dict, Path]:
        out = tmp_path / f"run-{next(numbers)}"
        return run(quick_config(**settings), out), out

    return make
