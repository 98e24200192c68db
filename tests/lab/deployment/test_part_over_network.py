"""A part that trains and travels, over three SuperNodes, for `make network`.

Flower starts a process for every message, so the fixed entries must outlast a process.
A second message with them would be in the traffic.
"""

from __future__ import annotations

import pytest

pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.xdist_group("network"),
]

NODES = 3


def test_fixed_entries_travel_once_over_the_network(
    networked, in_process, same_run
) -> None:
    settings = {
        "strategy": "fedbn",
        "model": "lenet",
        "train_only": "norms,head",
        "num_clients": NODES,
        "num_server_rounds": 3,
    }
    ours, theirs = networked(**settings), in_process(**settings)
    same_run(ours, theirs)
    assert ours["rejected"] == 0
