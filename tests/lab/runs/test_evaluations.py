"""A run tests the global model in several ways, and for each task.

The ways are re-estimated statistics, averaged BN parts, and single domains.
"""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import nn

from fedbn_flwr import global_state, personal_state
from fedbn_flwr.batchnorm.adaptation import evaluate_adapted
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client.personal_model import AVERAGED, metadata
from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.lab.config import Config, data_of, method_of
from fedbn_flwr.lab.objects_of_config import make_model
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data
from fedbn_flwr.lab.results.predictions import BATCH
from fedbn_flwr.lab.results.tester import _tested
from fedbn_flwr.training.evaluation import evaluate
from tests.support.pixels import SETTINGS as SEGMENTATION
from tests.support.runs import clients_of, config_of, model_of, serve_nodes, state_of

LOCAL_PARTS = {
    "fedbn": {"affine", "statistics", "counters"},
    "silobn": {"statistics", "counters"},
    "mtfl": {"affine"},
    "standalone": {"affine", "statistics", "counters", "rest"},
}


@pytest.mark.parametrize("strategy", LOCAL_PARTS)
def test_what_stays_with_the_clients_is_left_out_and_joined_by_one_call(
    quick_run, strategy: str
) -> None:
    """Otherwise the saved model would have the initial BN entries.

    Only its metadata would reveal them.
    """
    settings = {"num-server-rounds": 3, "local-steps": 5, "eval-on": "personal-own"}
    summary, out = quick_run(strategy=strategy, **settings)
    local = LOCAL_PARTS[strategy]
    part_of = split_state(make_model(config_of(out))).part_of
    absent = {name for name, part in part_of.items() if str(part) in local}
    assert part_of.keys() - state_of(out).keys() == absent
    said = summary["model"].items()
    assert {part for part, text in said if text.startswith("absent")} == local
    with pytest.raises(StateError) as caught:
        global_state(out)
    error = str(caught.value)
    assert summary["model-note"] in error
    assert ("eval-on=averaged-bn" in error) == (strategy != "standalone")
    assert personal_state(out, 0).keys() == part_of.keys()
    for path in (out / "clients").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(StateError, match="client=3"):
        personal_state(out, 3)


def test_without_a_shared_disk_the_clients_parts_stay_where_they_are(
    quick_config, tmp_path
) -> None:
    out = tmp_path / "out"
    serve_nodes(quick_config(strategy="fedbn", out=str(out)), out)
    assert not (out / "clients").exists()
    words = (
        "none is in the run's folder: state-dir=out saves them there, if the clients"
        " share its disk"
    )
    with pytest.raises(StateError, match=words):
        global_state(out)
    with pytest.raises(StateError, match=r"absent/model\.safetensors is missing"):
        global_state(tmp_path / "absent")


def test_a_global_test_with_untrained_bn_is_never_silent(quick_run, caplog) -> None:
    quick_run(strategy="fedbn", **{"eval-on": "personal-own"})
    assert "tests the model of the server" not in caplog.text
    quick_run(strategy="fedbn", **{"eval-on": "personal-own,global"})
    words = (
        "eval-on=global tests the model of the server, but strategy 'fedbn' keeps"
        " affine, counters, statistics"
    )
    assert words in caplog.text


@pytest.mark.parametrize("running", [(), (False,), (True,), (False, True)])
def test_a_client_is_also_tested_by_the_batch_if_its_model_has_running_statistics(
    running: tuple[bool, ...], quick_config
) -> None:
    config = quick_config()
    view, task = partitioned_data(config, 3).test_view(0), data_of(config).test_task
    layers = [nn.BatchNorm1d(784, track_running_stats=one) for one in running]
    model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(784, 10)).eval()
    held_out = _tested(model, "running", view, task, {"site": "a"})
    found = _tested(model, "running", view, task, {"site": "a", "client": 0})
    outputs = [found.test.outputs, held_out.test.outputs]
    assert held_out.by_batch is None
    if any(running):
        outputs.append(found.by_batch.outputs)
        assert (found.by_batch.client, found.by_batch.bn) == (0, BATCH)
    else:
        assert found.by_batch is None
    inputs = view.batch(torch.arange(len(view)))[0]
    for train, one in zip((False, False, True), outputs, strict=False):
        torch.testing.assert_close(one, model.train(train)(inputs).detach())


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, 500),
        # 500 images need 18 GB with ResNet-18, but a training batch fits.
        ({"image-size": 512}, 32),
        ({"image-size": 512, "batch-size": 4}, 7),
        ({"image-size": 512, "batch-size": 2000}, 500),
        ({**SEGMENTATION, "model": "tests.support.pixels:lraspp"}, 8),
    ],
)
def test_the_size_of_a_test_batch_follows_the_input_and_the_batch_of_the_training(
    settings, size: int
) -> None:
    usual = {"dataset": "cifar10", "model": "torchvision:resnet18"}
    data = data_of(Config.make({**usual, **settings}))
    assert data.test_task.plain_test_batch == size
    expected = 8 if "task" in settings else 500
    assert data.test_task.test_batch == data.task.test_batch == expected


@pytest.mark.parametrize("strategy", ["fedavg", "fedbn"])
def test_each_test_is_plain_evaluation_of_each_clients_model(
    quick_run, strategy: str
) -> None:
    """Training examples are tested without augmentation."""
    tests = "personal-own,personal-global,personal-domains"
    if strategy == "fedavg":
        tests += ",global,global-train"
    keys = {"dataset": "digits-domains", "partition": "domain", "num-clients": 5}
    keys |= {"eval-on": tests, "validation-share": 0.2, "augment": "flip"}
    summary, out = quick_run(strategy=strategy, **keys)
    config = config_of(out)
    task, data = data_of(config).test_task, partitioned_data(config, 5)
    domains = {f"domain-{name}": view for name, view in data.domain_views().items()}
    own = []
    for client, found in clients_of(out).items():
        model = model_of(out, personal_state(out, int(client)))
        views = {"own": data.test_view(int(client)), "global": data.test_view()}
        views |= {"validation": data.validation_view(int(client)), **domains}
        for test, view in views.items():
            expected = evaluate(model, view, task=task)
            assert found[f"{test}-accuracy"] == expected.metrics["accuracy"]
        own.append(found["own-accuracy"])
    assert len(own) == 5
    final = summary["final"]
    assert final["personal-own-accuracy"] == pytest.approx(statistics.mean(own))
    if strategy == "fedavg":
        expected = evaluate(model_of(out), data.train_view(), task=task)
        assert final["test-global-train-loss"] == pytest.approx(expected.loss, rel=1e-5)
        # Each client has a domain.
        for name in data.domain_views():
            by_clients = final[f"personal-own-accuracy/{name}"]
            assert by_clients == final[f"test-accuracy/{name}"]
    with pytest.raises(ConfigError, match="dataset=digits has no domains"):
        quick_run(strategy="fedbn", **{"eval-on": "personal-own,personal-domains"})


@pytest.mark.parametrize(
    ("strategy", "test", "prefix"),
    [("fedavg", "global", "test"), ("fedbn", "averaged-bn", "test-averaged-bn")],
)
def test_test_time_bn_is_tested_beside_the_plain_model(
    quick_run, strategy: str, test: str, prefix: str
) -> None:
    """The plain test is added even if the config does not request it."""
    adapts = {"test-bn": "mix", "eval-on": f"{test}-test-bn"}
    summary, out = quick_run(strategy=strategy, **adapts)
    model = model_of(out)
    averaged = {part for part, text in metadata(out).items() if text == AVERAGED}
    assert averaged == LOCAL_PARTS.get(strategy, set())
    config = config_of(out)
    assert method_of(config).tests == (f"{test}-test-bn", test)
    assert summary["headline"] == f"test-{test}-test-bn-accuracy"
    view, final = partitioned_data(config, 3).test_view(), summary["final"]
    adapted = evaluate_adapted(model, view, "mix").loss
    plain = evaluate(model, view).loss
    assert adapted != plain
    assert final[f"test-{test}-test-bn-loss"] == adapted
    assert final[f"{prefix}-loss"] == plain
    plain_run, _ = quick_run(strategy=strategy, **{"eval-on": test})
    assert summary["sha256"] == plain_run["sha256"], "a test changes nothing"
