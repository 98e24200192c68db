"""Runs of nodes with configs of their own, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from fedbn_flwr.lab.config import Config
from tests.support.runs import lines_of, serve_nodes


@pytest.fixture
def served(tmp_path) -> Callable:
    """Provide ``served(settings, node_configs, name="out")`` to run nodes.

    It returns the summary and the rounds.
    """

    def do(settings: Mapping, nodes: Sequence, name: str = "out"):
        out = tmp_path / name
        return serve_nodes(Config.make(settings), out, nodes), lines_of(out)

    return do
