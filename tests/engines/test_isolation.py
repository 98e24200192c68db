"""Under FedTAN, changes that training leaves in a model or a loss reach no other client.

The layers keep state in objects of drawn kinds, outside the state dict. The bits are
equal with the sites in another order, after a resume, and with any number of workers.
``test_links`` compares FedAvg with plain torch.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedbn_flwr import InProcessGrid, TorchClient, client_app
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.strategies import FedTAN
from fedbn_flwr.training import CLASSIFICATION, LearningRate, LocalTraining
from tests.engines.test_links import (
    SIZES,
    STATES,
    CountsClasses,
    built,
    site,
    task_of,
)


def unfreezes(model: Any) -> nn.Module:
    """Replace a forward pass. The first training pass changes ``requires_grad``."""
    layer = model.last
    own = layer.forward

    def forward(x: Tensor) -> Tensor:
        layer.weight.requires_grad_(layer.weight.requires_grad or layer.training)
        return own(x)

    layer.weight.requires_grad_(False)
    layer.forward = forward
    return model


def law(kinds: list[Any], is_changed: bool, has_loss: bool, workers: int) -> None:
    training = LocalTraining(
        learning_rate=LearningRate(0.05), local_steps=2, batch_size=4
    )

    def build() -> nn.Module:
        return unfreezes(built(kinds)) if is_changed else built(kinds)

    task: Any = functools.partial(task_of, CountsClasses)

    def client_fn(context: Any) -> TorchClient:
        own = site(context.node_config["partition-id"])
        given = task if has_loss else CLASSIFICATION
        return TorchClient(build, own, own, training, context=context, task=given)

    start = to_record(build().state_dict())

    def run(workers: int, seed: int, resumed: bool = False) -> dict[str, Any]:
        arrays, saved = start, None
        for last in (1, 2) if resumed else (2,):
            strategy = FedTAN(fraction_evaluate=0.0)
            if saved is not None:
                strategy.load_state_dict(saved, last - 1)
            grid = InProcessGrid(
                client_app(client_fn), len(SIZES), workers=workers, seed=seed
            )
            with grid:
                arrays = strategy.start(grid, arrays, num_rounds=last).arrays
            saved = strategy.state_dict()
        return from_record(arrays)

    alone = run(0, seed=1)
    for other in (run(0, seed=2), run(0, seed=3, resumed=True), run(workers, 4)):
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
def test_more_draws_with_four_workers(**case: Any) -> None:
    law(**case, workers=4)
