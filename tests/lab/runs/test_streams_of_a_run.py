"""Draws for different purposes of a whole run never share a stream."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict

import pytest

from fedbn_flwr.training import randomness

CASES = [
    {"strategy": "fedavg", "partition": "dirichlet", "fraction-train": 0.5},
    {"strategy": "fixbn", "partition": "classes", "recalibrate": True},
    {"strategy": "hbn", "partition": "studies.shards:unbalanced"},
    {"strategy": "fedtan", "partition": "dirichlet-equal"},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["strategy"])
def test_a_stream_has_one_generator(quick_run, monkeypatch, case) -> None:
    """Only the model is built several times under its seed, by one line of code."""
    derive_seed, places = randomness.derive_seed, defaultdict(list)

    def noted(seed: int, purpose: str, *keys: int | str) -> int:
        frame = inspect.currentframe()
        while frame.f_globals["__name__"] in {__name__, randomness.__name__}:
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        places[seed, purpose, *keys].append(place)
        return derive_seed(seed, purpose, *keys)

    for module in [*sys.modules.values()]:
        if getattr(module, "derive_seed", None) is derive_seed:
            monkeypatch.setattr(module, "derive_seed", noted)
    quick_run(
        **case,
        **{"num-clients": 4, "augment": "crop1,flip", "validation-share": 0.2},
    )
    assert {"batches", "augment", "dropout", "validation"} <= {one[1] for one in places}
    for (_, purpose, *keys), found in places.items():
        assert len({*found}) == 1, f"{purpose} {keys}: {found}"
        assert purpose == "model" or len(found) == 1, f"{purpose} {keys}: {found}"
