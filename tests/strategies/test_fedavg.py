"""Report, sampling and Flower's arguments of FedAvg with real clients."""

from __future__ import annotations

import copy
import pickle

import pytest
from flwr.app import MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr.errors import NothingTrainedError
from fedbn_flwr.server.runs.round_report import average_metrics
from fedbn_flwr.strategies import FedAvg

# Arguments.


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]
)
def test_a_copy_of_a_strategy_follows_its_own_arguments(copied) -> None:
    strategy = FedAvg(fraction_train=0.5)
    other = copied(strategy)
    other.fraction_train = 0.25
    assert strategy.run.flower_args.fraction_train == 0.5
    assert other.run.flower_args.fraction_train == 0.25
    assert other.run.flower_args.weighted_by_key == "num-examples"
    del strategy
    assert other.run.flower_args.min_train_nodes == other.min_train_nodes


# Nodes.


def test_a_plain_flower_numpy_client_app_is_rejected_with_advice(
    run_strategy, mlp
) -> None:
    # The function is never called because the legacy app cannot read the message.
    app, start = ClientApp(client_fn=lambda _: None), mlp().state_dict()
    run = run_strategy(FedAvg(), app, start, 2, rounds=1, fails=NothingTrainedError)
    rejected = run.reports[0].rejected
    assert len(rejected) == 2
    for text in rejected.values():
        assert "make it with fedbn_flwr.client_app(client_fn)" in text
    assert [*run.state] == [*start], "the initial model, not an empty record"


# Metrics.


def content(**metrics) -> RecordDict:
    return RecordDict({"metrics": MetricRecord(metrics)})


def test_a_metric_is_averaged_over_the_clients_that_report_it(caplog) -> None:
    """The metrics of a test set have the weights of this set.

    The loss of one of the two clients is not finite.
    """
    names = ["mnist-num-examples", "mnist-m-num-examples"]
    names += ["mnist-accuracy", "mnist-m-accuracy"]
    first = dict(zip(names, (3, 4, 0.0, 0.0), strict=True))
    second = dict(zip(names, (1, 4, 1.0, 1.0), strict=True))
    bad = {"r2": float("nan"), "loss": float("inf")}
    contents = [
        content(n=1, a=2.0, b=10.0, c=[1.0, 2.0], d=1.0, **bad, **first),
        content(n=3, a=4.0, c=[3.0, 4.0], d=[1.0], r2=0.5, loss=0.7, **second),
    ]
    averaged = dict(average_metrics(contents, "n"))
    assert [averaged.pop(name) for name in names] == [4, 8, 0.25, 0.5]
    assert averaged == {"a": 3.5, "b": 10.0, "c": [2.5, 3.5], "r2": 0.5, "loss": 0.7}
    assert caplog.messages == [
        "metric 'd' has different shapes at different clients and is not averaged"
    ]


@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        ("steps", (19, 19), 38),
        ("examples-processed", (190, 190), 380),
        ("dropped-batches", (1, 1), 2),
        ("own-num-examples", (4, 8), 12),
        ("num-examples", (4.0, 8.0), 12),
        # A user's metric whose name ends like a count is averaged.
        ("epochs", (2, 2), 2.0),
        ("mean-local-steps", (3.5, 1.5), 2.0),
        ("warm-up-steps", (3, 1), 1.5),
        ("steps", ([3.0, 1.0], [1.0, 1.0]), [1.5, 1.0]),
        ("own-num-examples", ([4.0], [8.0]), [7.0]),
        ("steps", (3.5, 1.5), 2.0),
    ],
)
def test_counts_are_summed_and_stay_counts(key: str, values, expected) -> None:
    contents = [
        content(n=n, **{key: value}) for n, value in zip((1, 3), values, strict=True)
    ]
    found = dict(average_metrics(contents, "n"))
    assert found == {key: expected}
    assert type(found[key]) is type(expected)
