"""A SuperLink and three SuperNodes as processes, with TLS, node keys and secrets: the bits of the run in process."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.network, pytest.mark.xdist_group("network")]

RUNS = [
    pytest.param({"strategy": "fedbn"}, id="fedbn"),
    pytest.param({"strategy": "fedtan", "fedtan_exchange": "channel"}, id="fedtan by channel"),
    pytest.param({"strategy": "fixbn"}, id="fixbn", marks=pytest.mark.slow),
    pytest.param(
        {"strategy": "fedtan", "fedtan_exchange": "messages"}, id="fedtan by messages", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("settings", RUNS)
def test_the_bits_of_the_run_in_process(settings, networked, in_process) -> None:
    ours, theirs = networked(**settings), in_process(**settings)
    for key in ("sha256", "final", "best", "ledger", "rejected"):
        assert ours[key] == theirs[key], key
    assert ours["rejected"] == 0
