"""A round of one step under FedTAN equals one centralised step.

The round runs through the strategy and its clients.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fedbn_flwr.lab.models import build_model
from fedbn_flwr.strategies import FedTAN
from tests.support.synchronised import (
    TRANSPORTS,
    WEIGHT_DECAY,
    centralised,
    client_data,
    distances,
    synchronised,
    trained,
)

MODES = ("3L+1", "2L+1")
SIZES = (2, 3, 1)
"""Of torchvision's deep models tests/batchnorm/sync has the step."""


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
    model = trained(build_model("mlp", num_classes=3, channels=1, size=28))
    data = client_data((1, 28, 28), sizes, seed=seed)
    found = one_round(run_step, model, data, fedtan_exchanges=exchanges).tensors
    oracle = centralised(model, data)
    assert max(distances(found, oracle, model.state_dict())) < 1e-10


@pytest.mark.parametrize("exchanges", MODES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_images_of_other_sizes_weigh_by_examples_and_all_clients_have_the_same_bits(
    run_step, transport: str, exchanges: str
) -> None:
    """One n counts the examples per element even if image sizes differ."""
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
