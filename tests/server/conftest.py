"""A fixture of the tests of the server."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def federate_mlp(federate, mlp, datasets) -> Callable[..., Any]:
    """Provide ``federate_mlp(strategy, ...)`` to run over the clients of ``SIZES``."""
    return functools.partial(federate, model=mlp, datasets=datasets)
