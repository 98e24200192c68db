"""FedTAN's law: a round of one step, through the strategy and its clients, is one
centralised step.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.lab.models import build_model
from fedbn_flwr.strategies import FedTAN
from tests.support.synchronised import (
    LEARNING_RATE,
    TRANSPORTS,
    WEIGHT_DECAY,
    Branches,
    WeightedBatchNorm,
    centralised,
    client_data,
    distances,
    synchronised,
    trained,
)

MODES = ("3L+1", "2L+1")
SIZES = (2, 3, 1)
NAMES = ("mlp", "lenet", "resnet20", "branches", "1d", "3d")
"""Of torchvision's deep models tests/batchnorm/sync has the step."""


def make(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A model in float64 and the shape of its inputs."""
    if name in ("mlp", "lenet", "resnet20"):
        shape = {"mlp": (1, 28, 28), "lenet": (3, 28, 28), "resnet20": (3, 16, 16)}[
            name
        ]
        return (
            trained(build_model(name, num_classes=3, channels=shape[0], size=shape[1])),
            shape,
        )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        if name == "branches":
            return trained(Branches()), (3, 6, 6)
        if name == "1d":
            layers = [
                nn.Conv1d(2, 5, 3),
                nn.BatchNorm1d(5),
                nn.Tanh(),
                nn.Flatten(),
                nn.Linear(30, 4),
            ]
            return trained(
                nn.Sequential(*layers, nn.BatchNorm1d(4), nn.Linear(4, 3))
            ), (2, 8)
        layers = [
            nn.Conv3d(2, 4, 2),
            nn.BatchNorm3d(4),
            nn.ReLU(),
            nn.Conv3d(4, 3, 2),
            nn.BatchNorm3d(3),
        ]
        return trained(nn.Sequential(*layers, nn.Flatten(), nn.Linear(24, 3))), (
            2,
            4,
            4,
            4,
        )


def one_round(run_step, model, data, strategy=FedTAN, **options):
    one_client = {"min_train_nodes": 1, "min_available_nodes": 1}
    own = {key: options.pop(key) for key in list(options) if key.startswith("fedtan_")}
    made = synchronised(
        strategy, options.get("transport", "barrier"), **one_client, **own
    )
    done = run_step(made, model, data, weight_decay=WEIGHT_DECAY, **options)
    assert done.strategy.reports[0].rejected == {}
    assert done.strategy.reports[0].participants == list(range(len(data)))
    return done


def off(run_step, model, data, **options) -> float:
    oracle, start = centralised(model, data), model.state_dict()
    return max(
        distances(one_round(run_step, model, data, **options).tensors, oracle, start)
    )


@pytest.mark.parametrize("exchanges", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_a_round_in_process_is_a_centralised_step(
    run_step, name: str, exchanges: str
) -> None:
    model, shape = make(name)
    data = client_data(shape, SIZES)
    assert off(run_step, model, data, fedtan_exchanges=exchanges) < 1e-10


@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6).filter(
        lambda sizes: sum(sizes) > 1
    ),
    exchanges=st.sampled_from(MODES),
    seed=st.integers(0, 99),
)
def test_the_law_holds_for_any_number_and_size_of_clients(
    run_step, sizes: list[int], exchanges: str, seed: int
) -> None:
    model, shape = make("mlp")
    data = client_data(shape, sizes, seed=seed)
    assert off(run_step, model, data, fedtan_exchanges=exchanges) < 1e-10


@pytest.mark.parametrize("exchanges", MODES)
def test_equal_batches_of_unequal_clients_weigh_examples_by_p_over_b(
    run_step, exchanges: str
) -> None:
    """Sizes 4, 12, 8 in batches of 4: client i's examples weigh p_i / b_i.

    The check of the model before the run has a batch of another size.
    """
    model, shape = make("mlp")
    data = client_data(shape, (4, 12, 8))
    seen: dict[int, Tensor] = {}
    for i, own in enumerate(data):
        own.batch = lambda positions, generator=None, i=i, own=own: (  # type: ignore[method-assign]
            (len(positions) == 4 and seen.setdefault(i, positions) is None)
            or own.inputs[positions],
            own.targets[positions],
        )
    done = one_round(
        run_step, model, data, fedtan_exchanges=exchanges, batch_size=4, local_steps=1
    )
    assert {len(positions) for positions in seen.values()} == {4}
    q = torch.cat(
        [torch.full((4,), len(own) / 24 / 4, dtype=torch.float64) for own in data]
    )
    start, oracle = model.state_dict(), copy.deepcopy(model)
    oracle.norm = WeightedBatchNorm(oracle.norm, q)
    inputs = torch.cat([own.inputs[seen[i]] for i, own in enumerate(data)])
    targets = torch.cat([own.targets[seen[i]] for i, own in enumerate(data)])
    (q * F.cross_entropy(oracle(inputs), targets, reduction="none")).sum().backward()
    torch.optim.SGD(
        oracle.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY
    ).step()
    want = oracle.state_dict()
    assert max(distances(done.tensors, want, start)) < 1e-10
    plain = centralised(model, [type(data[0])(inputs, targets)])
    assert min(distances(done.tensors, plain, start)) > 1e-3, (
        "the plain union is another step"
    )


@pytest.mark.parametrize("exchanges", MODES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_images_of_other_sizes_weigh_by_examples_and_all_clients_have_the_same_bits(
    run_step, transport: str, exchanges: str
) -> None:
    """Examples of one client have more positions than those of another: there is one n,
    by examples per element.
    """
    sizes, shapes = (6, 5, 9), ((2, 3), (4, 5), (6, 6))
    data = [
        client_data((3, *shape), (size,), seed=size)[0]
        for size, shape in zip(sizes, shapes, strict=True)
    ]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)]
    model = trained(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), *pool))
    run = one_round(
        run_step, model, data, transport=transport, fedtan_exchanges=exchanges
    )
    total = sum(sizes)
    means = [d.inputs.mean((0, 2, 3)) for d in data]
    mean = sum(n / total * m for n, m in zip(sizes, means, strict=True))
    squares = [
        (d.inputs - mean.view(1, 3, 1, 1)).square().mean((0, 2, 3)) for d in data
    ]
    var = sum(n / total * square for n, square in zip(sizes, squares, strict=True))
    count = total / sum(
        n / total / (height * width)
        for n, (height, width) in zip(sizes, shapes, strict=True)
    )
    sent = [
        message.content["arrays"]
        for message in run.grid.received
        if message.has_content() and message.content.array_records.get("arrays")
    ]
    assert len(sent) == len(data)
    for name, batch in (
        ("running_mean", mean),
        ("running_var", count / (count - 1) * var),
    ):
        wanted = 0.9 * model[0].get_buffer(name) + 0.1 * batch
        torch.testing.assert_close(
            run.tensors[f"0.{name}"], wanted, rtol=1e-13, atol=1e-15
        )
        assert len({record[f"0.{name}"].numpy().tobytes() for record in sent}) == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_later_steps_are_local_and_share_one_optimizer(
    run_step, transport: str
) -> None:
    """Three steps with momentum: the first by hand on the union, two local ones, then
    the average; slow and plain.
    """
    model, shape = make("mlp")
    data = client_data(shape, (4, 6, 5))
    done = one_round(
        run_step, model, data, transport=transport, local_steps=3, sgd_momentum=0.9
    )
    start, weights = model.state_dict(), [len(d) / 15 for d in data]
    local = [copy.deepcopy(model) for _ in data]
    # The first step: BN has the union's statistics, functions of all clients' inputs.
    # Gamma and beta get p_i F_i alone; a hidden layer gets all F_j through them.
    hidden = [
        own.hidden(d.inputs.flatten(1)) for own, d in zip(local, data, strict=True)
    ]
    union = torch.cat(hidden)
    mean, var = union.mean(0), union.var(0, correction=0)
    loss = torch.zeros(())
    for own, y, d, p in zip(local, hidden, data, weights, strict=True):
        x = (y - mean) / (var + own.norm.eps).sqrt() * own.norm.weight + own.norm.bias
        loss = loss + p * F.cross_entropy(own.fc(x.relu()), d.targets)
    loss.backward()
    for own, d, p in zip(local, data, weights, strict=True):
        optimizer = torch.optim.SGD(
            own.parameters(), LEARNING_RATE, momentum=0.9, weight_decay=WEIGHT_DECAY
        )
        for parameter in own.parameters():
            parameter.grad /= p  # the client steps on F_i, the average weighs it
        with torch.no_grad():
            own.norm.running_mean += 0.1 * (mean - own.norm.running_mean)
            own.norm.running_var += 0.1 * (var * 15 / 14 - own.norm.running_var)
            own.norm.num_batches_tracked += 1
        optimizer.step()
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(own(d.inputs), d.targets).backward()
            optimizer.step()
    states = [own.state_dict() for own in local]
    want = dict(states[0])  # counters are equal
    for name, value in want.items():
        if value.is_floating_point():
            want[name] = sum(p * s[name] for p, s in zip(weights, states, strict=True))
    assert max(distances(done.tensors, want, start)) < 1e-10
