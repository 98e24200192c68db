"""What is derived from the declarations of the methods equals what version 0.1 declared attribute by attribute.

``interface_of_0_1.json`` was written by the package at d534c624: the attributes of its 21 strategy classes for several
settings, and which of the 210 pairs ``combined`` took.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.server.methods import declared
from fedbn_flwr.server.sent_beside import sent_beside
from fedbn_flwr.server.travels import Travels, in_parallel, model_needs, sums_suffice, together
from fedbn_flwr.strategies import STRATEGIES, combined

RECORDED = json.loads((Path(__file__).parent / "interface_of_0_1.json").read_text())


@pytest.mark.parametrize("was", RECORDED["methods"], ids=lambda was: f"{was['name']}-{was['settings']}")
def test_what_follows_from_a_declaration_is_what_was_declared_before(was: dict[str, Any]) -> None:
    methods = STRATEGIES[was["name"]](**was["settings"]).methods
    whole, beside = methods.whole, sent_beside(methods)
    costs = [whole.exchanges.cost(gradient) for gradient in (True, False)] if whole.exchanges else [(0, 0)] * 2
    needs = {",".join(sorted(parts)) for one in methods for parts in model_needs(together(declared(one)))}
    if set(was["settings"]) & {"recalibrate", "eval_on"}:
        needs -= {""}  # these options also need "any BatchNorm" now, which their other need implies
    derived = {
        "local": sorted(whole.local),
        "synchronises": whole.exchanges is not None,
        "reestimates": methods.reestimates,
        "undo": whole.undo,
        "freezes-bn": methods.freezes_bn,
        "extra-copies": whole.extra_copies,
        "extra-statistics": list(whole.extra_statistics),
        "exchange-cost": [list(cost) for cost in costs],
        "all-at-once": whole.needs_all_at_once,
        "dp-refuses": bool(beside),
        "masks-refuse": any(not one.masked for one in beside),
        # SecAgg+ runs in the legacy loop alone, which refuses exchanges before it comes to this.
        "each-reply": was["each-reply"] if whole.exchanges else not sums_suffice(whole),
        "needs": sorted(needs),
    }
    assert {"name": was["name"], "settings": was["settings"], **derived} == was


def test_the_same_pairs_of_methods_can_be_combined() -> None:
    pairs = []
    for first, second in itertools.combinations(STRATEGIES, 2):
        try:
            combined(STRATEGIES[first], STRATEGIES[second])
        except ConfigError:
            continue
        pairs.append([first, second])
    assert pairs == RECORDED["combined"]


def test_phases_of_two_methods_run_in_parallel() -> None:
    first = [Travels("a", last=3), Travels("b", last=5), Travels("c")]
    second = [Travels("x", last=5, weights="equal"), Travels("y")]
    phases = [(one.phase, one.last, one.weights) for one in in_parallel([first, second])]
    assert phases == [("x", 3, "equal"), ("x", 5, "equal"), ("y", None, "examples")]


def test_two_ends_that_are_found_out_in_the_run_are_refused() -> None:
    with pytest.raises(ConfigError):
        in_parallel([[Travels("a"), Travels("b")], [Travels("x", last=2), Travels("y")]])
