"""The table of refused replies in docs/reference/replies.md is true.

Each row is printed by its test, from replies on both sides of each limit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import RecordDict

from fedbn_flwr.messages.records import to_record, views
from fedbn_flwr.strategies import FedAvg, FedNova, Scaffold
from fedbn_flwr.strategies.fednova import TAU
from fedbn_flwr.strategies.scaffold import VARIATES
from tests.support.bad_replies import (
    BAD,
    Spoil,
    put,
    spoil_entry,
    spoil_state,
    spoiling,
)

SIZES = (6, 13, 9)
PAGE = Path(__file__).parents[2] / "docs/reference/replies.md"
UNSEEN, WARNED, REFUSED = "not seen", "warned of", "refused"


def metric(value: Any, name: str = "loss") -> Spoil:
    return lambda content: content["metrics"].update({name: value})


def weights(factor: float) -> Spoil:
    names = "0.weight", "3.weight"
    return spoil_state(lambda s: s.update({n: s[n] * factor for n in names}))


def variates(value: float) -> Spoil:
    def spoil(content: RecordDict) -> None:
        found = views(content[VARIATES])
        content[VARIATES] = to_record({n: a * 0 + value for n, a in found.items()})

    return spoil


def many(number: int) -> Spoil:
    return lambda content: content["metrics"].update(
        {f"m{i}": 1.0 for i in range(number)}
    )


def large(megabytes: int) -> Spoil:
    return spoil_entry("0.bias", lambda _: np.zeros(megabytes * 2**17))


def entry(name: str, value: float) -> Spoil:
    return spoil_entry(name, put(value))


def counter(value: int) -> Spoil:
    return spoil_entry("1.num_batches_tracked", lambda a: a * 0 + value)


TEST = {"kind": "evaluate"}
ROWS: dict[str, tuple[Any, dict[str, Any], dict[str, tuple[str, Any, Spoil]]]] = {
    # The strategy, options, and by outcome: the limit, an example, and its reply.
    "weights times a factor": (
        FedAvg,
        {},
        {
            UNSEEN: ("norm up to 50 times the median", 40, weights(40)),
            WARNED: ("above", 100, weights(100)),
            REFUSED: (
                "above a million times the norm that was sent",
                1e7,
                weights(1e7),
            ),
        },
    ),
    "weights with the other sign": (
        FedAvg,
        {},
        {UNSEEN: ("always", -1, weights(-1))},
    ),
    "a value of a mean or a bias": (
        FedAvg,
        {},
        {
            UNSEEN: (
                "norm of the model up to 1000 times the median",
                100,
                entry("1.running_mean", 100),
            ),
            WARNED: ("above", 1e29, entry("1.running_mean", 1e29)),
            REFUSED: ("above 1e30, NaN, infinity", 1e31, entry("1.running_mean", 1e31)),
        },
    ),
    "a running variance": (
        FedAvg,
        {},
        {
            UNSEEN: ("from 0", 1e-45, entry("1.running_var", 1e-45)),
            REFUSED: ("below 0", -1e-45, entry("1.running_var", -1e-45)),
        },
    ),
    "growth of a counter of BatchNorm": (
        FedAvg,
        {},
        {
            UNSEEN: ("up to 10^6, or 1000 for each example", 10**6, counter(10**6)),
            REFUSED: ("above", 10**6 + 1, counter(10**6 + 1)),
        },
    ),
    "SCAFFOLD's variates": (
        Scaffold,
        {},
        {
            UNSEEN: ("norm of the reply up to 1000 times the median", 10, variates(10)),
            WARNED: ("above", -1e3, variates(-1e3)),
            REFUSED: (
                "10^4 times the median, over the change of the weights",
                1e6,
                variates(1e6),
            ),
        },
    ),
    "FedNova's tau": (
        FedNova,
        {},
        {
            UNSEEN: ("up to 10^6 times the median", 3, metric(3.0, TAU)),
            REFUSED: ("above, or below a millionth", 1e12, metric(1e12, TAU)),
        },
    ),
    "the number of examples": (
        FedAvg,
        {},
        {
            WARNED: (
                "other than in the query, which counts",
                99,
                metric(99, "num-examples"),
            ),
            REFUSED: ("0 or below, NaN, infinity", -1, metric(-1, "num-examples")),
        },
    ),
    "a loss of a test": (
        FedAvg,
        TEST,
        {
            UNSEEN: ("up to 1000 times the median", 100.0, metric(100.0)),
            WARNED: ("above; left out of the mean if not finite", 1e308, metric(1e308)),
        },
    ),
    "a share of a test": (
        FedAvg,
        TEST,
        {
            UNSEEN: ("from 0 to 1", 1.0, metric(1.0, "accuracy")),
            WARNED: ("outside, and left out of the mean", 1.5, metric(1.5, "accuracy")),
        },
    ),
    "a list for a number": (
        FedAvg,
        TEST,
        {WARNED: ("always, and left out of the mean", [1.0], metric([1.0]))},
    ),
    "the bytes of an array": (
        FedAvg,
        {},
        {
            REFUSED: (
                "above 4 times the largest entry and 4 MiB, unread",
                None,
                large(5),
            )
        },
    ),
    "the number of metrics": (
        FedAvg,
        {},
        {
            UNSEEN: ("up to 1000, with 100,000 numbers", 900, many(900)),
            REFUSED: ("above", 2000, many(2000)),
        },
    ),
}


@pytest.mark.parametrize("what", ROWS)
def test_the_table_of_the_page_has_what_happens(
    federate_mlp, caplog, what: str
) -> None:
    strategy, options, cases = ROWS[what]
    cells = dict.fromkeys((UNSEEN, WARNED, REFUSED), "-")
    for expected, (limit, example, spoil) in cases.items():
        caplog.clear()
        run = federate_mlp(strategy(), rounds=1, wrap=spoiling(spoil, **options))
        node = f"node {run.grid.get_node_ids()[BAD]} "
        named = [r for r in caplog.records if r.levelname == "WARNING"]
        named = [r for r in named if node in r.getMessage()]
        found = WARNED if named else UNSEEN
        found = REFUSED if run.reports[0].rejected else found
        assert found == expected, example
        number = isinstance(example, (int, float))
        cells[expected] = f"{limit} ({example:g})" if number else limit
    row = f"| {what} | {' | '.join(cells.values())} |"
    print(row)
    assert row in PAGE.read_text(encoding="utf-8").splitlines()
