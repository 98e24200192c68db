"""The error for an app without the mod or a hook names the line to write."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
from flwr.app import Context, Message

from fedbn_flwr.errors import ClientPartError, ConfigError
from fedbn_flwr.mods import bn_mod
from fedbn_flwr.strategies import (
    MTFL,
    FedAvg,
    FedBN,
    FedDNA,
    FedProx,
    FedTAN,
    FedTAN2,
    FedWon,
    FixBN,
    Scaffold,
    SiloBN,
    Standalone,
    StaticBN,
)
from tests.support.in_process import app_of
from tests.support.user_loops import SIZES, hooked_loop, plain_loop

MOD = "ClientApp(mods=[bn_mod])"
RULES, FIRST_STEP = "with bn_rules(model, msg, context):", "'synchronise-first-step'"
MISSING = {
    # the strategy, and the missing mod or client hook in the error
    "fedbn": (FedBN, MOD),
    "silobn": (SiloBN, MOD),
    "mtfl": (MTFL, MOD),
    "standalone": (Standalone, MOD),
    "fedprox": (functools.partial(FedProx, proximal_mu=0.01), "'proximal'"),
    "scaffold": (Scaffold, "'variates'"),
    "momentum": (functools.partial(FedAvg, momentum_scope="local"), "'momentum'"),
    "fixbn": (functools.partial(FixBN, freeze_at=1), RULES),
    "fixbn auto": (
        functools.partial(FixBN, freeze_at="auto", freeze_window=2),
        "'report-drift'",
    ),
    "staticbn": (StaticBN, RULES),
    "fedwon": (FedWon, "'agc'"),
    "fedtan": (FedTAN, FIRST_STEP),
    "fedtan by messages": (FedTAN, FIRST_STEP),
    "feddna": (FedDNA, FIRST_STEP),
    "fedtan2": (functools.partial(FedTAN2, fedtan_rounds=1), FIRST_STEP),
}
# These cases need more than the mod.
WITH_MOD = [case for case in MISSING if MISSING[case][1] != MOD]
BARE = [case for case in MISSING if "by messages" not in case]


@pytest.mark.parametrize(
    ("case", "mods"),
    [*((case, ()) for case in BARE), *((case, (bn_mod,)) for case in WITH_MOD)],
)
def test_a_missing_client_part_ends_the_run_in_the_first_round_that_needs_it(
    run_app, user_app, mlp, wsconv_net, case: str, mods
) -> None:
    make, missing = MISSING[case]
    strategy, model = make(), wsconv_net if case == "fedwon" else mlp
    app = user_app(plain_loop, mods, query=True, model=model)
    with pytest.raises(ClientPartError, match=re.escape(missing)):
        run_app(strategy, app, model=model, barrier="by messages" not in case)
    assert len(strategy.reports) == (2 if case == "fixbn" else 1)
    assert len(strategy.reports[-1].rejected) == len(SIZES)


def test_fedtan_without_a_query_handler_is_refused(run_app, user_app) -> None:
    with pytest.raises(
        ConfigError, match=r"register `@app.query\(\)` and return answer_query"
    ):
        run_app(FedTAN(), user_app(hooked_loop))


def broken(message: Message, context: Context) -> None:
    raise FileNotFoundError("/data/train.csv")


@pytest.mark.parametrize(
    "strategy", [StaticBN, functools.partial(FedAvg, recalibrate=True)]
)
def test_an_app_that_measures_no_statistics_is_told_the_handler(
    run_app, user_app, strategy
) -> None:
    """Otherwise, the model would be tested with the initial statistics."""
    app = user_app(hooked_loop)
    with pytest.raises(
        ClientPartError,
        match=r"Add to the app a function with @app.query\('statistics'\) that",
    ):
        run_app(strategy(), app)

    app.query("statistics")(broken)
    with pytest.raises(
        ClientPartError,
        match=r"no client could measure its statistics: (?s:.*)/data/train.csv",
    ):
        run_app(strategy(), app)


def without_arrays(message: Message, context: Context, call_next: Any) -> Message:
    """A mod that requires arrays, although a query has no arrays."""
    if not message.content.array_records:
        broken(message, context)
    return call_next(message, context)


@pytest.mark.parametrize(
    "mods", [[bn_mod], [bn_mod, without_arrays], [without_arrays, bn_mod]]
)
def test_the_error_of_a_query_handler_or_of_a_mod_is_told(
    run_app, user_app, caplog, mods
) -> None:
    app = user_app(hooked_loop, mods, query=without_arrays in mods)

    if without_arrays not in mods:
        app.query()(broken)
    with pytest.raises(
        ConfigError,
        match=(
            r"(?s)training examples .* its answer to the query failed:"
            r" .*/data/train.csv"
        ),
    ):
        run_app(FedTAN(), app)
    said = r"its answer to the query failed(?s:.*)/data/train\.csv"
    assert any(re.search(said, text) for text in caplog.messages)


def test_one_client_without_the_mod_is_left_out_and_the_round_continues(
    run_app, user_app
) -> None:
    with_mod, without = user_app(), user_app(mods=())

    def mixed(message: Message, context: Context) -> Message:
        app = without if context.node_config["partition-id"] == 1 else with_mod
        return app(message, context)

    run = run_app(FedBN(), app_of(mixed), rounds=2)
    assert [report.participants for report in run.strategy.reports] == [[0, 2]] * 2
    assert MOD in run.reason(1, 1)
    assert MOD in run.reason(1, 2)
