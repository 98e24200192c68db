"""Every config key acts under every strategy, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedbn_flwr.lab.config import GROUPS, Config
from fedbn_flwr.strategies import STRATEGIES
from tests.support.checkout import ROOT
from tests.support.every_key import KEYS, effect
from tests.support.fast import thinned

NAMES = list(STRATEGIES)
# Every sixth cheap key under one strategy; `make slow` has all keys and strategies.
SAMPLE = [
    (NAMES[(5 * i) % len(NAMES)], key)
    for i, key in enumerate(KEYS)
    if "model" not in (key, *KEYS[key][1]) and key not in ("num-clients", "dataset")
][::6]


def test_every_key_that_is_not_tried_has_a_test() -> None:
    keys = {key for group in GROUPS for key in Config.keys(group)}
    paths = {*ROOT.glob("tests/**/test_*.py")} - {Path(__file__)}
    texts = "\n".join(path.read_text() for path in paths).replace("_", "-")
    assert [key for key in sorted(keys - KEYS.keys()) if key not in texts] == []


@pytest.mark.parametrize(("strategy", "key"), thinned(SAMPLE))
def test_a_key_acts_or_is_refused(strategy: str, key: str) -> None:
    beside, alone = effect(strategy, key)
    assert beside in ("acts", "refused")
    assert alone in ("acts", "refused")


@pytest.mark.parametrize(
    "key",
    [
        *("agc", "proximal-mu", "freeze-window", "server-momentum"),
        *("personal", "head-steps", "fine-tune"),
    ],
)
def test_a_key_acts_under_its_own_method(key: str) -> None:
    """This excludes a table that only refuses."""
    own = {
        "agc": "scaffold",
        "proximal-mu": "fedprox",
        "freeze-window": "fixbn",
        "server-momentum": "fedavgm",
        "head-steps": "fedrep",
    }
    assert effect(own.get(key, "fedtan"), key)[0] == "acts"


# Two replace the running statistics, one in any case; the head of FedRep is fc, and
# standalone has one model for each site.
WITHOUT_A_WORD = {
    (name, key)
    for name, keys in {
        "staticbn": ("bn-momentum", "variance", "recalibrate"),
        "hbn": ("bn-momentum", "variance"),
        "fedrep": ("personal",),
        "standalone": ("personal",),
    }.items()
    for key in keys
}


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_every_key_acts_or_is_refused_under_every_strategy(key: str) -> None:
    pairs = {(strategy, key) for strategy in STRATEGIES} - WITHOUT_A_WORD
    found = {strategy: effect(strategy, key) for strategy, _ in pairs}
    assert all(beside and alone for beside, alone in found.values()), found
    assert any("acts" in pair for pair in found.values()), found
