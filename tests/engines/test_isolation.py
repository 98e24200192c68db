"""Under FedTAN, changes that training leaves in a model or a loss reach no other client.

The layers keep state in objects of drawn kinds, outside the state dict. The bits are
equal with the sites in another order, after a resume, and with any number of workers.
``test_links`` compares FedAvg with plain torch.
"""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.strategies import FedTAN
from fedbn_flwr.training import CLASSIFICATION, LearningRate, LocalTraining
from tests.engines.test_links import (
    STATES,
    CountsClasses,
    built,
    site,
    task_of,
    trained,
)
from tests.support.federation import torch_clients


def unfreezes(model) -> nn.Module:
    """Replace a forward pass. The first training pass changes ``requires_grad``."""
    layer = model.last
    own = layer.forward

    def forward(x: Tensor) -> Tensor:
        layer.weight.requires_grad_(layer.weight.requires_grad or layer.training)
        return own(x)

    layer.weight.requires_grad_(False)
    layer.forward = forward
    return model


def law(kinds: list, is_changed: bool, has_loss: bool, workers: int) -> None:
    training = LocalTraining(
        learning_rate=LearningRate(0.05), local_steps=2, batch_size=4
    )

    def build() -> nn.Module:
        return unfreezes(built(kinds)) if is_changed else built(kinds)

    task = functools.partial(task_of, CountsClasses) if has_loss else CLASSIFICATION
    client_fn = torch_clients(lambda: build, [site(0), site(1)], training, task=task)
    start = to_record(build().state_dict())
    alone, *others = [
        from_record(trained(FedTAN, client_fn, start, *case))
        for case in ((1, False, 0), (2, False, 0), (3, True, 0), (4, False, workers))
    ]
    for other in others:
        for name, array in alone.items():
            assert array.tobytes() == other[name].tobytes(), name


drawn = {
    "kinds": st.lists(st.sampled_from(STATES), min_size=1, max_size=3),
    "is_changed": st.booleans(),
    "has_loss": st.booleans(),
}


def test_clients_share_nothing_that_a_model_keeps() -> None:
    law([*STATES], is_changed=True, has_loss=True, workers=2)


@pytest.mark.slow
@settings(max_examples=40)
@given(**drawn)
def test_more_draws_with_four_workers(**case) -> None:
    law(**case, workers=4)
