"""A SCAFFOLD client undoes a round whose reply is not used.

The server's c stays the mean of the clients' c_i. Replies are lost or refused in any
round. Nodes restart with their files and another node id. The run is killed and
resumed. Clients come and go. The client is ours, or a user's loop with the mod.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from fedbn_flwr.messages.protocol import Continuity
from fedbn_flwr.strategies import FedBN, Scaffold, combined
from fedbn_flwr.strategies.scaffold import Variates
from tests.support.bad_replies import lose_replies
from tests.support.fast import fast
from tests.support.federation import Outcome, RecordingGrid
from tests.support.user_loops import SIZES

CLIENTS = len(SIZES)
RULES = "fedbn-flwr.rules"
USED = pytest.mark.parametrize(
    "min_replies", [1, CLIENTS], ids=["the others are used", "no reply is used"]
)


def state_of(run: Outcome) -> Variates:
    """Return SCAFFOLD's state, even from a combination."""
    states = run.strategy.run.states.values()
    return next(state for state in states if isinstance(state, Variates))


def assert_mean(run: Outcome) -> None:
    """Assert that c is the mean of the c_i, with 0 for a client without training."""
    own = [entries for i in range(CLIENTS) if (entries := run.kept(i)[RULES])]
    variates = state_of(run).variates
    assert variates
    for name, c in variates.items():
        key = next(key for key in own[0] if key.endswith(f"variates/{name}"))
        mean = np.sum([mine[key] for mine in own], axis=0) / CLIENTS
        np.testing.assert_allclose(c, mean, rtol=1e-9, atol=1e-12, err_msg=name)


@USED
@pytest.mark.parametrize("method", fast([Scaffold, combined(FedBN, Scaffold)], 1, 2))
def test_replies_are_lost(
    method, min_replies, federate, datasets, mlp, monkeypatch, caplog
) -> None:
    """Replies are lost in the first round, in a later round and twice in a row.

    Without tests, nothing else repairs a client's local state.
    """
    lose_replies(monkeypatch, {1: 0, 2: 2, 3: 2, 5: 1})
    strategy = method(min_replies=min_replies, fraction_evaluate=0.0)
    run = federate(strategy, mlp, datasets, rounds=6)
    some = CLIENTS - 1 if min_replies == 1 else 0
    used = [
        0 if report.kept_previous else report.replied for report in strategy.reports
    ]
    assert used == [some, some, some, CLIENTS, some, CLIENTS]
    assert_mean(run)
    assert "had lost its local state" not in caplog.text


@pytest.mark.parametrize("query", [True, False], ids=["a query", "no query"])
def test_a_node_returns_under_another_id(query, on_disk, monkeypatch) -> None:
    """Without an answer to the query, the server cannot identify the node.

    The node then keeps its state.
    """
    strategy, get_node_ids = Scaffold(), RecordingGrid.get_node_ids

    def renamed(grid: RecordingGrid) -> list[int]:
        inner = grid.inner
        if len(strategy.reports) == 2 and not hasattr(grid, "renamed"):
            grid.renamed = True
            old = inner._node_ids[1]
            inner._node_ids[1] = old + 1
            inner._partition_of[old + 1] = inner._partition_of.pop(old)
            inner._contexts.pop(old, None)
        return get_node_ids(grid)

    monkeypatch.setattr(RecordingGrid, "get_node_ids", renamed)
    run = on_disk(strategy, 4, query=query)
    assert [report.rejected for report in strategy.reports] == [{}] * 4
    assert_mean(run)


@USED
def test_a_run_resumed_from_a_round_whose_reply_was_lost(
    min_replies, on_disk, monkeypatch
) -> None:
    """The run continues for a round after the checkpoint before it is killed."""
    saved = []

    def checkpoint(server_round: int, *_: Any) -> None:
        if server_round == 2:
            saved.append(copy.deepcopy(before.state_dict()))
            before.continuity = Continuity("first", (2,))

    before = Scaffold(min_replies=min_replies, on_round_end=checkpoint)
    with monkeypatch.context() as patch:
        lose_replies(patch, {2: 1})
        start = on_disk(before, 3).history[2]
    after = Scaffold()
    after.load_state_dict(*saved, 2)
    run = on_disk(after, 5, start=start, committed=(2,))
    assert [report.rejected for report in after.reports] == [{}] * 3
    assert_mean(run)
