"""A run over a network, with two nodes and two rounds, for `make network`.

This is the smallest run that gives a client its local state back. Flower starts a
process for every message; here each process is a fork that has torch already.
"""

from __future__ import annotations

from tests.support.network import NETWORK

pytestmark = NETWORK

NODES = 2


def test_fedbn_keeps_its_part_over_the_network(networked, in_process, same_run) -> None:
    settings = {
        "strategy": "fedbn",
        "num_clients": NODES,
        "num_server_rounds": 2,
        "eval_every": 2,
    }
    ours = networked(**settings)
    same_run(ours, in_process(**settings))
    assert ours["rejected"] == 0
