"""Averages of spectral norm and of pruning are repaired or named."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm

from fedbn_flwr.batchnorm.averaging import average
from fedbn_flwr.batchnorm.not_averaged import repair
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.messages.records import tensors, to_state

LAYERS = {
    "square": lambda: nn.Linear(5, 5),
    "wide": lambda: nn.Linear(9, 4),
    "convolution": lambda: nn.Conv2d(3, 4, 3),
    "transposed": lambda: nn.ConvTranspose2d(4, 4, 3),
}
WAYS = {"old": spectral_norm, "new": parametrizations.spectral_norm}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LAYERS)
def test_the_largest_singular_value_of_an_average_is_1(kind: str, way: str) -> None:
    """Before the repair, it is larger. Equal vectors keep their bits."""
    torch.manual_seed(3)
    model = nn.Sequential(WAYS[way](LAYERS[kind]()))
    example = torch.randn(2, 9 if kind == "wide" else 5)
    if isinstance(model[0], (nn.Conv2d, nn.ConvTranspose2d)):
        example = torch.randn(2, model[0].in_channels, 5, 5)
    states = []
    for _ in range(2):
        client = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in client.parameters():
                parameter.add_(torch.randn_like(parameter))
            client(example)
        states.append(to_state(client.state_dict()))

    def largest(state) -> float:
        tested = copy.deepcopy(model).eval()
        tested.load_state_dict(tensors(state))
        weight = tested[0](example) is not None and tested[0].weight.detach()
        axis = int(kind == "transposed")
        return float(torch.linalg.matrix_norm(weight.movedim(axis, 0).flatten(1), 2))

    whole = average(states, [1.0, 1.0], split_state(model))
    before = largest(whole)
    repair(whole)
    assert before > 1.01
    assert largest(whole) == pytest.approx(1, abs=1e-3)
    same = average(states[:1], [1.0], split_state(model))
    repair(same)
    assert all(np.array_equal(same[name], states[0][name]) for name in same)


SIZES = (24.0, 16.0, 7.0)  # with these weights, the average of three ones is below 1


def test_an_average_of_equal_orthogonal_layers_is_the_layer() -> None:
    model = parametrizations.orthogonal(nn.Linear(6, 8).double())
    state = to_state(model.state_dict())
    whole = average([state] * 3, SIZES, split_state(model))
    repair(whole)
    before = model.weight.detach()
    model.load_state_dict(tensors(whole))
    torch.testing.assert_close(model.weight.detach(), before)


def test_an_average_of_equal_masks_is_the_mask(caplog) -> None:
    layer = prune.l1_unstructured(nn.Linear(6, 8).double(), "weight", 0.5)
    state = to_state(layer.state_dict())
    whole = average([state] * 3, SIZES, split_state(layer))
    repair(whole)
    assert np.array_equal(whole["weight_mask"], state["weight_mask"])
    assert not caplog.messages


@pytest.mark.parametrize("amounts", [(0.5, 0.5), (0.2, 0.5)])
def test_different_masks_of_pruning_are_named_once(amounts, caplog) -> None:
    torch.manual_seed(3)
    layer, states = nn.Linear(4, 3), []
    for amount in amounts:
        pruned = prune.l1_unstructured(copy.deepcopy(layer), "weight", amount)
        states.append(to_state(pruned.state_dict()))
    for _ in range(2):
        repair(average(states, [1.0, 3.0], split_state(states[0])))
    differ = amounts[0] != amounts[1]
    assert caplog.text.count("'weight_mask' is a mask of pruning") == differ
