"""A strategy's state of version 0.1 is refused before anything is sent, and the error says what to do."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.strategies import STRATEGIES

OF_EVERY_STRATEGY: dict[str, Any] = {
    "local_hashes": {"0": "ab"},
    "volatile": ["0"],
    "started": ["0"],
    "gathered": {},
    "shared_bn": {},
    "momentum": {},
}
OF_ONE: dict[str, dict[str, Any]] = {
    "scaffold": {"variates": {}, "num_clients": 3},
    "fixbn": {"frozen_after": None, "deltas": []},
    "fedbs": {"switched_after": None, "agreed": 0},
    "fedadam": {"m": {}, "v": {}},
}


@pytest.mark.parametrize("name", ["fedavg", "fedbn", *OF_ONE])
def test_a_state_of_version_0_1_is_refused_before_anything_is_sent(name: str, mlp: Any) -> None:
    strategy, grid = STRATEGIES[name](), Mock()
    strategy.load_state_dict(OF_EVERY_STRATEGY | OF_ONE.get(name, {}), 2)
    with pytest.raises(ConfigError, match="begin the run anew"):
        strategy.start(grid=grid, initial_arrays=to_record(mlp().state_dict()), num_rounds=4)
    assert grid.mock_calls == []
