"""The head is the module that the model calls fc, classifier or head."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from torch import nn

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.strategies import FedAvg, FedBN
from fedbn_flwr.training.head import HEADS, head_of


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


def tied() -> nn.Module:
    """Return a model whose decoder has the encoder's weight."""
    model = nn.Sequential()
    model.encoder = nn.Linear(6, 6, bias=False)
    model.norm = nn.BatchNorm1d(6)
    model.decoder = nn.Linear(6, 6, bias=False)
    model.decoder.weight = model.encoder.weight
    model.last = nn.Linear(6, 3)
    return model


@pytest.mark.parametrize("personal", ["encoder", "decoder"])
@pytest.mark.parametrize("method", [FedAvg, FedBN])
def test_one_of_two_names_of_a_tensor_cannot_stay(
    method: type[FedAvg], personal: str
) -> None:
    model = tied()
    split = split_state(model)
    arrays = to_record(model.state_dict())
    with pytest.raises(ConfigError, match="names of the same tensor"):
        method(personal=personal, parts=split).prepare(arrays, 1, 1)
    method(personal="encoder,decoder", parts=split).prepare(arrays, 1, 1)
