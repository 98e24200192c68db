"""FedTAN's step with images of other sizes under masked sums.

tests/reference and tests/batchnorm/sync have the centralised step.
"""

from __future__ import annotations

import pytest
from torch import nn

from fedbn_flwr.strategies import FedTAN
from tests.support.protected import masked
from tests.support.synchronised import (
    client_data,
    synchronised,
    trained,
)


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
