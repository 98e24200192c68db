"""The head is the module that the model calls fc, classifier or head."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from torch import nn

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.training.model_state import HEADS, head_of


def named(*names: str) -> nn.Module:
    return nn.Sequential(OrderedDict((name, nn.Linear(3, 3)) for name in names))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel])
def test_client_and_server_find_the_same_head(head: str, wrap: type) -> None:
    """A head that is registered first is found, and wrappers do not matter."""
    model = wrap(named(head, "body"))
    arrays = {name: entry.numpy() for name, entry in model.state_dict().items()}
    assert head_of(model.state_dict()) == head_of(arrays) == head
    of_model = split_state(model, personal="last-layer").personal
    assert of_model == split_state(arrays, personal="last-layer").personal
    assert [name.rpartition(".")[0].rpartition(".")[2] for name in of_model] == 2 * [
        head
    ]


@pytest.mark.parametrize(
    "model",
    [
        named("body", "fc3"),
        named("body", "fc", "head"),
        nn.Sequential(named("body", "fc")),
        nn.Linear(3, 3),
    ],
)
def test_a_head_is_never_guessed(model: nn.Module) -> None:
    for split in (model, model.state_dict()):
        with pytest.raises(
            ConfigError, match="exactly one module named fc, classifier"
        ):
            split_state(split, personal="last-layer")
