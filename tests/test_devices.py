"""A run on a GPU equals the run on the CPU.

The tests run on a fake GPU (``tests/support/fake_gpu.py``), and on a real GPU if the
machine has one.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedbn_flwr.batchnorm.layers import tracking_layers
from fedbn_flwr.batchnorm.reestimation import reestimate_statistics
from fedbn_flwr.lab.models import build_model
from fedbn_flwr.strategies import FedAvg, FedBN, FedTAN
from fedbn_flwr.training import LearningRate, LocalTraining, train
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.randomness import torch_generator
from tests.support.fake_gpu import fake_gpu
from tests.support.fast import fast
from tests.support.points import Points
from tests.support.seeds import with_seed
from tests.support.synchronised import (
    WEIGHT_DECAY,
    centralised,
    client_data,
    distances,
    synchronised,
    trained,
)

SIZES = (6, 4, 5)
CPU = torch.device("cpu")
TRAINING = LocalTraining(
    learning_rate=LearningRate(0.1), batch_size=4, local_epochs=2, sgd_momentum=0.9
)


def resnet() -> nn.Module:
    return trained(build_model("resnet20", num_classes=3, channels=3, size=16))


def images(number: int) -> Points:
    return client_data((3, 16, 16), (number,))[0]


def stream(purpose: str) -> torch.Generator:
    return torch_generator(3, purpose)


def close(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Float64 on two devices differs by the order of sums, but counters are equal."""
    assert list(found) == list(expected)
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance, check_device=False
    )


@pytest.mark.parametrize(
    "memory_format", fast([torch.contiguous_format, torch.channels_last], 1)
)
def test_training_and_evaluation_are_those_of_the_cpu(
    device, memory_format: torch.memory_format
) -> None:
    data, here = images(9), resnet()
    there = copy.deepcopy(here).to(device, memory_format=memory_format)
    results = [
        train(model, data, TRAINING, learning_rate=0.01, stream=stream)
        for model in (there, here)
    ]
    assert {value.device.type for value in there.state_dict().values()} == {device.type}
    # Six steps with momentum enlarge the rounding.
    close(there.state_dict(), here.state_dict(), 1e-6)
    found, expected = results
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.accuracy == expected.accuracy
    assert found.num_steps == expected.num_steps
    there.load_state_dict(here.state_dict())
    found, expected = (evaluate(one, data, batch_size=4) for one in (there, here))
    assert found.loss == pytest.approx(expected.loss, rel=1e-9)
    assert found.metrics == expected.metrics
    moments = []
    for model in (there, here):
        of_layers = reestimate_statistics(model, data, batch_size=4, seed=0)
        assert len(of_layers) == len(tracking_layers(here))
        moments.append({path: (one.mean, one.m2) for path, one in of_layers.items()})
    close(*moments)


@pytest.mark.parametrize("strategy", [FedAvg, FedBN])
def test_a_federation_ends_in_the_state_of_the_cpu(
    federate, datasets, mlp, device, strategy
) -> None:
    options = {"rounds": 2, "local_epochs": 1, "batch_size": 0}
    there, here = (
        federate(strategy(), lambda on=on: mlp().to(on), datasets, **options)
        for on in (device, CPU)
    )
    assert there.strategy.reports[0].rejected == {}
    close(there.state, here.state)
    if strategy is FedBN:
        close(there.local_state(1), here.local_state(1))


@with_seed()
def network() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    return trained(nn.Sequential(*layers, nn.Linear(64, 3)))


@pytest.mark.parametrize("transport", ["barrier", "messages"])
def test_fedtan_of_several_clients_in_one_process_is_a_centralised_step(
    run_step, device, transport
) -> None:
    model, data = network(), client_data((3, 6, 6), (2, 3, 1))
    made = synchronised(FedTAN, transport, fedtan_exchanges="2L+1")
    there = copy.deepcopy(model).to(device)
    done = run_step(made, there, data, transport=transport, weight_decay=WEIGHT_DECAY)
    assert done.strategy.reports[0].rejected == {}
    # moments, gradients, the model
    assert done.strategy.reports[0].train.exchanges == 3
    union = centralised(model, [(one.inputs, one.targets) for one in data])
    assert max(distances(done.tensors, union, model.state_dict())) < 1e-9


def test_values_are_read_from_a_gpu_at_the_end_of_a_round_and_not_in_its_steps(
    monkeypatch,
) -> None:
    (data,) = client_data((3, 16, 16), (24,), dtype=torch.float32)
    here = resnet().float()
    launches = []
    parameters_and_buffers = len(here.state_dict())

    def waits(steps: int) -> tuple:
        settings = replace(TRAINING, local_epochs=0, local_steps=steps)
        with fake_gpu(monkeypatch) as costs:
            model = copy.deepcopy(here).to("cuda")
            train(model, data, settings, learning_rate=0.01, stream=stream)
            trained_in = dict(costs.reads)
            # the inputs and targets of a step
            assert costs.uploads == parameters_and_buffers + 2 * steps
            evaluate(model, data, batch_size=24 // steps)
            tested_in, before = dict(costs.reads), costs.launches.total()
            reestimate_statistics(model, data, batch_size=24 // steps)
            reestimation = costs.launches.total() - before
            with torch.no_grad():
                for _ in range(steps):
                    model.train()(torch.zeros(4, 3, 16, 16, device="cuda"))
            forwards = costs.launches.total() - before - reestimation
            launches.append((reestimation, forwards))
            return trained_in, tested_in, dict(costs.reads)

    assert waits(2) == waits(6)
    passes, forwards = (more - less for less, more in zip(*launches, strict=True))
    assert forwards > 4 * 60
    # In addition to the forward pass: four more batches, each with a conversion, the
    # variance and a product in each layer.
    assert passes <= forwards + 4 * 3 * len(tracking_layers(resnet()))
