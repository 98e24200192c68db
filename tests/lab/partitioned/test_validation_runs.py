"""Each client puts validation examples aside and never trains on them.

Each tested round tests them.
"""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data
from fedbn_flwr.lab.runs import serve
from fedbn_flwr.lab.runs.check_start import checked_config
from fedbn_flwr.lab.runs.node import RunClients, client_fn
from tests.support.runs import lines_of

SHARE = {"validation-share": 0.2}


def test_validation_examples_are_put_aside_on_each_client_and_never_trained_on(
    quick_config,
) -> None:
    config, whole = quick_config(**SHARE), quick_config()
    split = partitioned_data(config, 3)
    before = partitioned_data(whole, 3)
    labels, clients = (
        split.dataset.train.labels.numpy(),
        RunClients.of(checked_config(config)),
    )
    for client in range(3):
        train, aside = split.train[client], split.validation[client]
        assert np.array_equal(
            np.sort(np.concatenate([train, aside])), before.train[client]
        )
        for label in np.unique(labels[before.train[client]]):
            held = (labels[before.train[client]] == label).sum()
            assert abs((labels[aside] == label).sum() - 0.2 * held) < 1
        context = Context(
            1,
            1,
            {"partition-id": client, "num-partitions": 3},
            RecordDict(),
            config.to_mapping(),
        )
        assert (
            clients.num_examples(context)
            == len(client_fn(context).data.train)
            == len(train)
        )
        assert len(split.validation_view(client)) == len(aside)
        assert np.array_equal(split.test[client], before.test[client]), (
            "the test part does not change"
        )
    assert len(split.validation_view()) == sum(map(len, split.validation))
    assert len(before.validation_view()) == 0


@pytest.mark.parametrize(
    ("eval_on", "share", "asked"),
    [
        ("global", 0.3, []),
        ("global,personal-own", 0.3, ["own"]),
        ("personal-own,global", 0.3, ["own", "validation"]),
        ("personal-own", 0.0, ["own"]),
    ],
)
def test_clients_validate_where_their_own_models_decide(
    eval_on: str, share: float, asked: list[str]
) -> None:
    """Otherwise the server tests the global model on all validation examples."""
    settings = {"strategy": "fedbn", "eval-on": eval_on, "validation-share": share}
    assert serve.tests_of_clients(Config.make(settings), None) == asked


def test_the_main_metric_drives_the_result_and_early_stopping(quick_run) -> None:
    """Each metric chooses another round as the best; a loss must be low."""
    settings = {
        "num-server-rounds": 6,
        "early-stopping": 6,
        "validation-share": 0.3,
        "learning-rate": 0.5,
    }
    for metric, choose in (("loss", min), ("auroc", max)):
        summary, out = quick_run(**settings, **{"metrics": metric})
        lines = lines_of(out)
        validated = [line[f"validation-{metric}"] for line in lines]
        stopped = validated.index(choose(validated))
        assert summary["headline"] == f"test-{metric}"
        assert summary["best-validation"] == {
            "round": stopped + 1,
            f"validation-{metric}": validated[stopped],
        }
        assert summary["final"][f"test-{metric}"] == lines[stopped][f"test-{metric}"]
