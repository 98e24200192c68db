"""Mods of other people beside ours: which order works, and what is said of the others.

Flower's mods for differential privacy expect one record each way, with the same names, in every message that they see.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping

from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import ClientPartError, ConfigError
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.mods import local_bn
from fedbn_flwr.strategies import FedAvg, FedBN, FedTAN
from tests.support.user_loops import SIZES, hooked_loop

ADVICE = "Put local_bn first, ClientApp(mods=[local_bn]), and give mods that act on training to the training function"
local_dp_mod = LocalDpMod(clipping_norm=100.0, sensitivity=0.0, epsilon=1.0, delta=0.5)


@pytest.fixture
def run_private(mlp) -> Callable[[FedAvg, ClientApp], FedAvg]:
    """``run_private(strategy, app)``: two rounds within Flower's wrapper, which sends the norm to clip to."""

    def run(strategy: FedAvg, app: ClientApp) -> FedAvg:
        private = DifferentialPrivacyClientSideFixedClipping(strategy, 0.0, 100.0, len(SIZES))
        with InProcessGrid(app, len(SIZES), max_workers=1) as grid:
            private.start(grid, to_record(mlp().state_dict()), num_rounds=2, timeout=30)
        return strategy

    return run


@pytest.mark.parametrize("mod", [fixedclipping_mod, local_dp_mod])
def test_with_local_bn_first_and_the_mod_on_training_everything_passes(run_private, user_app, mod: Any) -> None:
    strategy = run_private(FedBN(), user_app(query=True, train_mods=[mod]))
    assert [(r.participants, r.rejected) for r in strategy.reports] == [([0, 1, 2], {})] * 2
    assert [list(report.evaluations) for report in strategy.reports] == [["0", "1", "2"]] * 2


@pytest.mark.parametrize("mod", [fixedclipping_mod, local_dp_mod])
def test_a_mod_of_the_whole_app_lets_the_nodes_train_and_is_named(run_private, user_app, mod: Any, caplog) -> None:
    """It refuses the query and the evaluations; the first is no reason not to train."""
    strategy = run_private(FedAvg(), user_app(mods=[mod], query=True))
    assert [report.participants for report in strategy.reports] == [[None] * 3] * 2
    assert "did not say what data they hold" in caplog.text
    assert ADVICE in caplog.text
    for why in strategy.reports[0].rejected.values():
        assert re.search(f"evaluation: error 6: (fixedclipping_mod|LocalDpMod) .*{re.escape(ADVICE)}", why)


@pytest.mark.parametrize("mod", [fixedclipping_mod, local_dp_mod])
def test_before_local_bn_such_a_mod_ends_the_run_with_its_name(run_private, user_app, mod: Any) -> None:
    """The reply lacks what stays with the client, and the mod would refuse it, with a reply to a wrong message."""
    with pytest.raises(ClientPartError, match=rf"(fixedclipping_mod|LocalDpMod) expects .*{re.escape(ADVICE)}"):
        run_private(FedBN(), user_app(mods=[mod, local_bn], query=True))


@pytest.mark.parametrize("mods", [[local_dp_mod], [local_bn, local_dp_mod]])
def test_fedtan_names_the_mod_that_hides_the_data(run_app, user_app, mods: Sequence[Any]) -> None:
    with pytest.raises(ConfigError, match=rf"training examples .* LocalDpMod expects .*{re.escape(ADVICE)}"):
        run_app(FedTAN(), user_app(hooked_loop, mods, query=True), rounds=1)


def test_behind_local_bn_the_mod_hides_the_amount_of_data_only(run_app, user_app) -> None:
    strategy = FedBN()
    run_app(strategy, user_app(mods=[local_bn, local_dp_mod], query=True), rounds=2)
    assert [report.participants for report in strategy.reports] == [[0, 1, 2]] * 2


def test_a_reply_to_a_wrong_message_is_reported_with_its_node_and_cause(run_app, user_app) -> None:
    """``LocalDpMod`` answers its own reply where the names differ."""
    strategy = FedBN()
    app = user_app(mods=[], query=True, train_mods=[local_dp_mod, local_bn])
    with pytest.raises(ClientPartError, match="LocalDpMod expects the keys in the ArrayRecord of the reply message"):
        run_app(strategy, app, rounds=1)
    reasons = list(strategy.reports[0].rejected.values())
    assert [f"(partition {i}): error 6: LocalDpMod expects the keys" in why for i, why in enumerate(reasons)] == [
        True
    ] * 3
    assert "no reply" not in "".join(reasons)
