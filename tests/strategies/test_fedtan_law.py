"""FedTAN's step with images of other sizes, through the strategy and its clients.

tests/reference and tests/batchnorm/sync have the centralised step.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedbn_flwr.strategies import FedTAN
from tests.support.synchronised import (
    TRANSPORTS,
    client_data,
    synchronised,
    trained,
)


@pytest.mark.parametrize("exchanges", ["3L+1", "2L+1"])
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
    made = synchronised(FedTAN, transport, fedtan_exchanges=exchanges)
    run = run_step(made, model, data, transport=transport)
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
