"""Runs of nodes with configs of their own, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from fedbn_flwr.lab.config import Config
from tests.support.runs import lines_of, serve_nodes


@pytest.fixture
def served(tmp_path) -> Callable[..., Any]:
    """Provide ``served(config or keys, node_configs, name="out")`` to run nodes.

    It returns the summary and the rounds.
    """

    def do(
        given: Config | Mapping[str, Any],
        nodes: Sequence[dict[str, Any]],
        name: str = "out",
    ) -> Any:
        config = given if isinstance(given, Config) else Config.make(given)
        summary = serve_nodes(config, tmp_path / name, nodes)
        return summary, lines_of(tmp_path / name)

    return do
