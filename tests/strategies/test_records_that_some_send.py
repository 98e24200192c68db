"""Additional records that only some clients send.

The server uses the records of the clients that sent them: momentum, shared BN parts,
moments and variates. A client sends no record in some rounds or leaves out a
layer. The oracle reads the replies as they arrive. Its result is compared with the
record that the server sends in the next round.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.strategies import (
    MTFL,
    FedAvg,
    FedBN,
)
from tests.support.bad_replies import BAD, spoiling
from tests.support.fast import thinned
from tests.support.many_layers import two_layers

SIZES = (6, 13, 9)
LAYERS = ("1", "4")
Replies = Sequence[Mapping[str, Array]]
"""The record of each client by entry, in the order of partition ids; empty for one that
sent none.
"""


def shares(values: Sequence[float]) -> list[float]:
    return [value / sum(values) for value in values]


def mean_of_those_who_have_it(sent: Replies) -> dict[str, Array]:
    """Return the |D_i|-weighted mean of each entry."""
    names: set[str] = set()
    for record in sent:
        names |= record.keys()
    found = {}
    for name in names:
        having = [
            (record[name], size)
            for record, size in zip(sent, SIZES, strict=True)
            if name in record
        ]
        p = shares([size for _, size in having])
        found[name] = sum(w * array for w, (array, _) in zip(p, having, strict=True))
    return found


def averaged(sent: Replies) -> dict[str, Array]:
    """Return the average of BN parts and the maximum of counters."""
    found = mean_of_those_who_have_it(sent)
    for name in [name for name in found if name.endswith("num_batches_tracked")]:
        found[name] = np.max(
            [record[name] for record in sent if name in record], axis=0
        )
    return found


CASES: Mapping[
    str,
    tuple[
        Callable[[], FedAvg[Any]], str, str, Callable[[Replies], Mapping[str, Array]]
    ],
] = {
    "momentum": (
        functools.partial(FedAvg, momentum_scope="global"),
        *("momentum", "momentum", mean_of_those_who_have_it),
    ),
    "shared bn of fedbn": (
        functools.partial(FedBN, eval_on="averaged-bn"),
        "averaged-bn",
        "result",
        averaged,
    ),
    "shared bn of mtfl": (
        functools.partial(MTFL, eval_on="averaged-bn"),
        "averaged-bn",
        "result",
        averaged,
    ),
}
# The last record of a client counts until the client sends a new record.
OF_THE_LATEST = ("averaged-bn", "bn-variates")


LOST = ("in round 2", "always", "a layer")
RUNS = [
    (case, lost)
    for case, lost in itertools.product(CASES, LOST)
    if lost != "a layer" or CASES[case][1] != "averaged-bn"
]
"""A part of a client's BN is refused."""


@pytest.mark.parametrize(("case", "lost"), thinned(RUNS))
def test_the_server_takes_those_who_have_it(
    federate, datasets, case: str, lost: str
) -> None:
    make, record, place, oracle = CASES[case]

    def spoil(content: Any) -> None:
        kept = {
            name: a
            for name, a in from_record(content[record]).items()
            if not name.startswith("4.")
        }
        content[record] = to_record(kept if lost == "a layer" else {})

    app = functools.partial(
        spoiling, spoil, rounds=(1, 2) if lost == "always" else (2,)
    )
    settings = {"sgd_momentum": 0.9 if record == "momentum" else 0.0, "local_steps": 2}
    run = federate(
        make(),
        two_layers,
        datasets,
        rounds=3 - (place == "result"),
        wrap=app,
        **settings,
    )
    assert not any(report.rejected for report in run.strategy.reports)
    replies = [message.content for message in run.grid.of("train", replies=True)]
    # three clients, two rounds
    records = [from_record(content[record]) for content in replies[:6]]
    first, second = records[:3], records[3:]
    assert bool(second[BAD]) == (lost == "a layer")
    sent = second
    if record in OF_THE_LATEST:
        sent = [new or old for new, old in zip(second, first, strict=True)]
    wanted = oracle(sent)
    assert wanted
    if place == "result":
        found = run.state
    else:
        asked = [message.content for message in run.grid.of("train")]
        found = from_record(asked[-1][place])
        assert place == "arrays" or found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(
            found[name], array, rtol=1e-12, atol=1e-15, err_msg=name
        )
