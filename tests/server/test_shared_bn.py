"""The average of local BN parts, compared with a slow reference.

Other tests show the clients that are tested with the average.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.clientapp import ClientApp

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client import TorchClient
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.records import from_record
from fedbn_flwr.server.rounds.testing import completing_entries
from fedbn_flwr.strategies import (
    FedAvg,
    FedBN,
    Standalone,
)
from fedbn_flwr.training import LearningRate, LocalTraining
from tests.support.federation import torch_clients

SIZES = (6, 13, 9, 5)
AVERAGED = "averaged-bn"


def participants(run: Any) -> list[int]:
    """Return the clients whose replies were used in some round."""
    found: set[int] = set()
    for report in run.strategy.reports:
        found |= {*report.participants}
    return sorted(found)


def test_only_the_upload_grows_and_only_if_averaged_bn_is_tested(
    federate, datasets, mlp
) -> None:
    run = federate(FedBN(eval_on=AVERAGED), mlp, datasets)
    plain = federate(FedBN(eval_on="personal-own"), mlp, datasets)
    for mine, other in zip(run.strategy.reports, plain.strategy.reports, strict=True):
        assert mine.train.up - other.train.up == 4 * 16 * 8, (
            "gamma, beta, mean, variance of 4 channels in float64"
        )
        assert mine.train.counters_up - other.train.counters_up == 4 * 8
        assert (mine.train.down, mine.train.exchanges) == (
            other.train.down,
            other.train.exchanges,
        )
    for message in plain.grid.received:
        if message.metadata.message_type == "train":
            assert set(message.content["arrays"]) == set(split_state(mlp()).rest)
            assert list(message.content.array_records) == ["arrays"]


def test_a_client_that_has_not_trained_is_tested_with_the_average(
    federate, datasets, mlp
) -> None:
    """One of four clients trains in the first round.

    The others still begin from the common start later.
    """
    tests = {}
    for asked in (AVERAGED, "personal-own"):
        run = federate(
            FedBN(fraction_train=0.25, min_train_nodes=1, seed=1, eval_on=asked),
            mlp,
            datasets,
            rounds=5,
        )
        sent = run.grid.of("evaluate")[:4]
        tests[asked] = {
            run.grid.partition(m.metadata.dst_node_id): from_record(m.content["arrays"])
            for m in sent
        }
    (first,) = run.strategy.reports[0].participants
    names = split_state(mlp()).select(FedBN().local)
    start = {name: tensor.numpy() for name, tensor in mlp().state_dict().items()}
    own = {}
    for partition in range(4):
        averaged, plain = tests[AVERAGED][partition], tests["personal-own"][partition]
        assert ("1.weight" in averaged) == ("1.weight" in plain) == (partition != first)
        if partition != first:
            own = own or {name: averaged[name] for name in names}
            assert all(np.array_equal(plain[name], start[name]) for name in names)
            assert all(np.array_equal(averaged[name], own[name]) for name in names)
    assert not np.array_equal(own["1.running_mean"], start["1.running_mean"]), (
        "the parts of the client that trained"
    )
    # each client gets the whole model once, and then keeps its own entries
    begun = []
    for message in run.grid.sent:
        if message.metadata.message_type == "train":
            arrays = from_record(message.content["arrays"])
            if "1.weight" in arrays:
                begun.append(arrays)
    assert len(begun) == len(participants(run)) > 1
    for arrays in begun:
        for name in names:
            assert np.array_equal(arrays[name], start[name])


@pytest.mark.parametrize("loop", ["start", "legacy"])
def test_the_users_own_test_gets_the_average_or_a_warning(
    federate, run_legacy_loop, datasets, mlp, caplog, loop
) -> None:
    """``evaluate_fn`` and the final arrays once silently had initial BN values."""

    def history(strategy: FedAvg) -> list[dict[str, np.ndarray]]:
        caplog.clear()
        if loop == "start":
            return federate(strategy, mlp, datasets, rounds=2).history
        training = LocalTraining(learning_rate=LearningRate(0.1), batch_size=4)
        app = ClientApp(client_fn=torch_clients(mlp, datasets, training))
        got = run_legacy_loop(strategy, app, mlp().state_dict(), 4, 2)
        return [
            dict(zip(mlp().state_dict(), arrays, strict=True)) for arrays in got.history
        ]

    start = {name: tensor.numpy() for name, tensor in mlp().state_dict().items()}
    strategy = FedBN(eval_on=AVERAGED)
    seen = history(strategy)
    average = completing_entries(strategy.run, AVERAGED)
    assert len(average) == 5
    assert all(np.array_equal(seen[-1][name], average[name]) for name in average)
    assert not np.array_equal(seen[1]["1.running_mean"], start["1.running_mean"])
    assert "not trained" not in caplog.text
    seen = history(FedBN())
    assert all(np.array_equal(seen[-1][name], start[name]) for name in average)
    (said,) = [text for text in caplog.messages if "not trained" in text]
    assert "'fedbn' keeps 5 of the model's entries" in said
    assert "eval_on='averaged-bn'" in said
    history(Standalone())
    said = caplog.text
    assert "'standalone' keeps 9 of the model's entries" in said
    assert "averaged-bn" not in said
    history(FedAvg())
    assert "not trained" not in caplog.text


def test_an_average_that_no_client_shared_is_named(
    federate, datasets, mlp, caplog
) -> None:
    class Reserved(TorchClient):
        def fit(self, parameters, config):
            return super().fit(parameters, {**config, "fedbn-flwr.hooks": ""})

    run = federate(FedBN(eval_on=AVERAGED), mlp, datasets, rounds=2, client=Reserved)
    start = mlp().state_dict()["1.running_mean"].numpy()
    assert np.array_equal(run.history[-1]["1.running_mean"], start)
    said = [
        text for text in caplog.messages if "no client has shared its BN parts" in text
    ]
    assert [text.split(":")[0] for text in said[:-1]] == ["round 1", "round 2"]
    assert "inside `with bn_rules(...)`" in said[-1]


def test_parts_that_do_not_fit_are_refused(federate, datasets, mlp) -> None:
    class Wrong(TorchClient):
        def fit(self, parameters, config):
            arrays, count, metrics = super().fit(parameters, config)
            if self.partition_id == 1:
                # The last array is the counter, and the variance is before it.
                arrays[-1] = np.full_like(arrays[-2], -1.0)
                arrays[-2] = np.full_like(arrays[-2], -1.0)
            return arrays, count, metrics

    run = federate(FedBN(eval_on=AVERAGED), mlp, datasets, rounds=1, client=Wrong)
    (why,) = run.strategy.reports[0].rejected.values()
    assert "partition 1" in why
    assert "'1.running_var' has a negative variance" in why


@pytest.mark.parametrize("method", [FedAvg, Standalone])
def test_methods_without_averaged_bn_refuse_it(method) -> None:
    with pytest.raises(
        ConfigError, match=f"strategy '{method.name}' has no such model"
    ):
        method(eval_on=AVERAGED)


def test_a_test_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"eval_on='average-bn': unknown test 'average-bn'. Did you mean"
            r" 'averaged-bn"
        ),
    ):
        FedBN(eval_on="average-bn")
