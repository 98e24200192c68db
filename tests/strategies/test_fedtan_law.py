"""FedTAN's step with images of other sizes, through the strategy and its clients.

tests/reference and tests/batchnorm/sync have the centralised step.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedbn_flwr.strategies import FedTAN
from tests.support.protected import masked
from tests.support.synchronised import (
    TRANSPORTS,
    client_data,
    synchronised,
    trained,
)


@pytest.mark.parametrize("exchanges", ["3L+1", "2L+1"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_images_of_other_sizes_weigh_by_pixels_and_all_clients_have_the_same_bits(
    run_step, transport: str, exchanges: str
) -> None:
    """The running statistics are the statistics of all pixels of the union."""
    sizes, shapes = (6, 5, 9), ((2, 3), (4, 5), (6, 6))
    data = [
        client_data((3, *shape), (size,), seed=size)[0]
        for size, shape in zip(sizes, shapes, strict=True)
    ]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)]
    model = trained(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), *pool))
    made = synchronised(FedTAN, transport, fedtan_exchanges=exchanges)
    run = run_step(made, model, data, transport=transport)
    pixels = torch.cat([d.inputs.transpose(0, 1).flatten(1) for d in data], 1)
    sent = [
        message.content["arrays"]
        for message in run.grid.received
        if message.has_content() and message.content.array_records.get("arrays")
    ]
    assert len(sent) == len(data)
    for name, batch in (
        ("running_mean", pixels.mean(1)),
        ("running_var", pixels.var(1)),
    ):
        wanted = 0.9 * model[0].get_buffer(name) + 0.1 * batch
        torch.testing.assert_close(
            run.tensors[f"0.{name}"], wanted, rtol=1e-13, atol=1e-15
        )
        assert len({record[f"0.{name}"].numpy().tobytes() for record in sent}) == 1


@pytest.mark.parametrize("equal", [True, False])
def test_masked_sums_name_the_layer_whose_examples_differ(
    run_step, caplog, equal: bool
) -> None:
    """The server cannot read how many elements a client has."""
    shapes = [(3, 3)] * 3 if equal else [(2, 3), (4, 5), (3, 3)]
    data = [client_data((3, *shape), (4,))[0] for shape in shapes]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)]
    model = trained(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), *pool))
    run_step(masked(synchronised(FedTAN, "messages")), model, data)
    told = [text for text in caplog.messages if "BatchNorm layer '0'" in text]
    assert bool(told) != equal
