"""A SuperLink and three SuperNodes as processes give the bits in process.

They use TLS, node keys and secrets.
"""

from __future__ import annotations

import pytest

from tests.support.network import NETWORK

pytestmark = NETWORK


@pytest.mark.parametrize(
    ("strategy", "own"),
    [
        ("fedbn", {}),
        ("fixbn", {}),
        ("fedtan", {"fedtan_transport": "messages"}),
        ("fedtan", {"fedtan_transport": "channel"}),
        # Flower starts a process for every message, so fixed entries must outlast it.
        # A second message with them would be in the traffic.
        ("fedbn", {"model": "lenet", "train_only": "norms,head"}),
        (
            "fedavg",
            {
                "feature_norm": "sqrt-d",
                "eval_on": "global,global-test-bn",
                "test_bn": "mix",
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_bits_are_those_of_the_run_in_process(
    strategy, own, networked, in_process, same_run
) -> None:
    ours = networked(strategy=strategy, **own)
    same_run(ours, in_process(strategy=strategy, **own))
    assert ours["rejected"] == 0
