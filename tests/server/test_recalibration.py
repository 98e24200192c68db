"""Tests use re-estimated statistics, but training does not.

The server checks the statistics of clients, and reports count their traffic.
"""

from __future__ import annotations

import copy
import functools
import re
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

from fedbn_flwr.client.torch_client import TorchClient
from fedbn_flwr.errors import ClientPartError
from fedbn_flwr.strategies import (
    MTFL,
    FedAvg,
    FedBN,
    Scaffold,
    SiloBN,
)
from tests.support.bad_replies import fail, put, spoil_entry, spoil_state, spoiling
from tests.support.federation import ALONE

SIZES = (6, 13, 9)
STATISTICS = ("1.running_mean", "1.running_var")


def trained(run) -> list[bytes]:
    """Return all arrays of training messages in the order of partitions."""
    found = []
    for pair in run.grid.pairs():
        for message in pair:
            for key, record in message.content.array_records.items():
                found += [
                    key.encode() + name.encode() + array.data
                    for name, array in record.items()
                ]
    return found


@pytest.mark.parametrize(
    "method",
    [FedAvg, Scaffold, functools.partial(SiloBN, fraction_train=0.5, seed=3)],
    ids=["fedavg", "scaffold", "silobn half"],
)
def test_recalibration_asks_every_client_and_does_not_change_training(
    federate_mlp, mlp, same_bits, method
) -> None:
    model = functools.partial(mlp, dropout=0.3)
    plain, mine, beside = (
        federate_mlp(method(**options), model=model, rounds=2)
        for options in ({}, {"recalibrate": True}, {"eval_on": "global, recalibrated"})
    )
    assert trained(plain) == trained(mine) == trained(beside)
    asked = [m.metadata.message_type for m in mine.grid.sent]
    assert asked.count("query.statistics") == 2 * len(SIZES)
    offered = beside.strategy.run.completing_entries("recalibrated")
    assert offered.keys() == {*STATISTICS}
    # If the plain model is tested, the statistics are offered but not inserted.
    same_bits(beside.state, plain.state)
    same_bits(mine.state, {**plain.state, **offered})
    assert plain.strategy.run.completing_entries("recalibrated") == {}


OWN = {
    "fedbn": FedBN,
    "silobn": SiloBN,
    "mtfl": MTFL,
    "personal": functools.partial(FedAvg, personal="3"),
}


@pytest.mark.parametrize("method", OWN)
def test_a_client_with_its_own_model_measures_its_own_data(
    federate_mlp, datasets, method
) -> None:
    """The oracle is a plain mean and variance over the inputs of the layer.

    Training does not change, and only SiloBN asks for more: its weights are global.
    """
    tested = []

    class Watched(TorchClient):
        @contextmanager
        def tested_model(self, parameters, config):
            with super().tested_model(parameters, config) as lent:
                tested.append((self.partition_id, copy.deepcopy(lent.plain)))
                yield lent

    make = OWN[method]
    plain = federate_mlp(make(), rounds=2)
    mine = federate_mlp(make(recalibrate=True), rounds=2, client=Watched)
    assert trained(plain) == trained(mine)
    asked = mine.grid.of("query.statistics")
    assert bool(asked) == (method == "silobn")
    assert len(tested) == 2 * len(SIZES)
    for client, model in tested:
        values = model[0](datasets[client].inputs)
        torch.testing.assert_close(model[1].running_mean, values.mean(0))
        torch.testing.assert_close(model[1].running_var, values.var(0))


def test_one_client_has_the_same_statistics_alone_and_pooled(
    federate_mlp, datasets
) -> None:
    losses = []
    for make in (FedAvg, *OWN.values()):
        strategy = make(recalibrate=True, **ALONE)
        run = federate_mlp(strategy, datasets=datasets[:1], rounds=2)
        (results,) = run.reports[-1].evaluations.values()
        losses.append(results["loss"])
    assert losses == losses[:1] * len(losses)


@pytest.mark.parametrize(
    ("options", "exchanges"),
    [({"recalibrate": True}, (2, 0)), ({"eval_on": "recalibrated"}, (1, 1))],
    ids=str,
)
def test_the_traffic_is_counted_with_what_needs_the_statistics(
    federate_mlp, options, exchanges
) -> None:
    """They are for every test, or for a single test."""
    strategy = FedAvg(fraction_evaluate=0.0, **options)
    federate_mlp(strategy, rounds=1)
    (report,) = strategy.reports
    assert (report.train.exchanges, report.evaluate.exchanges) == exchanges


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_entry("absent", np.negative), "KeyError"),
        (
            spoil_state(lambda state: state.pop("1.m2")),
            "the reply lacks count, mean or m2 of layer '1'",
        ),
        (
            spoil_entry("1.mean", lambda a: a[:2]),
            r"layer '1': the client sent int64 \(\), float64 \(2,\), float64 \(4,\)",
        ),
        (
            spoil_entry("1.m2", lambda a: a.astype("complex128")),
            r"float64 \(4,\), complex128 \(4,\)",
        ),
        (spoil_entry("1.m2", lambda a: a[:1]), r"float64 \(4,\), float64 \(1,\)"),
        (spoil_entry("1.m2", put(-1.0)), "the smallest M2 is -1.0"),
        (spoil_entry("1.mean", put(np.nan)), "entry '1.mean' contains nan"),
        (spoil_entry("1.count", put(0)), "count is 0"),
        (
            spoil_state(lambda state: state.update({"9.count": np.asarray(3)})),
            "'9.count' .* is not from a BatchNorm layer",
        ),
    ],
)
def test_bad_statistics_are_rejected_and_the_others_pooled(
    federate_mlp, datasets, spoil, said
) -> None:
    wrap = spoiling(spoil, kind="query.statistics")
    run = federate_mlp(FedAvg(recalibrate=True), rounds=1, wrap=wrap)
    (why,) = run.reports[0].rejected.values()
    assert "partition 1" in why
    assert "statistics" in why
    assert re.search(said, why)
    assert run.reports[0].participants == [0, 1, 2]
    kept = torch.cat([datasets[i].inputs for i in (0, 2)])
    linear = run.tensors["0.weight"], run.tensors["0.bias"]
    hidden = torch.nn.functional.linear(kept, *linear)
    np.testing.assert_allclose(run.state["1.running_var"], hidden.var(0), rtol=1e-12)


@pytest.mark.parametrize("fewer", [1, 2])
def test_a_model_of_before_is_measured_again_on_other_clients(
    federate_mlp, fewer: int
) -> None:
    """No reply of round 2 is used. In a round, the server does not see a client."""
    wrap = spoiling(fail, rounds=[2], who=range(len(SIZES)))
    strategy = FedAvg(recalibrate=True)
    run = federate_mlp(strategy, rounds=2, wrap=wrap, hide={fewer: [2]})
    assert strategy.reports[1].kept_previous
    assert len(run.grid.of("query.statistics")) == 5
    assert strategy.run.measured == ["0", "1", "2"][: 4 - fewer]


def test_a_run_in_which_no_client_has_statistics_ends(federate_mlp, caplog) -> None:
    """If the clients answer, but not with statistics, the model keeps its own."""
    nobody = {"kind": "query.statistics", "who": range(len(SIZES))}
    run = functools.partial(federate_mlp, FedAvg(recalibrate=True), rounds=1)
    with pytest.raises(
        ClientPartError, match=r"no client could measure (?s:.*)disk full"
    ):
        run(wrap=spoiling(fail, **nobody))
    run(wrap=spoiling(RecordDict.clear, **nobody))
    assert "no statistics are re-estimated" in caplog.text
