"""The statistics in an app's answer.

A Lightning autoencoder is an example of a model whose ``forward`` reaches only a part of
its BatchNorm: its ``forward`` encodes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedbn_flwr.messages.protocol import STATISTICS_QUERY, MessageConfig
from fedbn_flwr.messages.records import from_record, tensors, to_record
from fedbn_flwr.mods import answer_statistics
from tests.support.many_layers import two_layers


class Autoencoder(nn.Module):
    """An autoencoder that encodes in ``forward`` and also decodes in training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double()
        self.decoder = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def decoded(self, x: Tensor) -> Tensor:
        return self.decoder(self(x))


def measured(
    net: nn.Module,
    other: nn.Module,
    data: Any,
    *layers: str,
    fixed: tuple[str, ...] = (),
    **given: Any,
) -> dict[str, Tensor]:
    """Return the statistics that ``other`` measures with the state of ``net``."""
    sent = MessageConfig(layers=layers, fixed_entries=fixed)
    config = ConfigRecord(sent.write())
    content = {"arrays": to_record(net.state_dict()), "config": config}
    query = Message(RecordDict(content), 1, STATISTICS_QUERY)
    loader = DataLoader(TensorDataset(data.inputs, data.targets), len(data))
    context = Context(1, 2, {}, RecordDict(), {})
    reply = answer_statistics(query, context, other, loader, **given)
    return dict(tensors(from_record(reply.content["arrays"])))


def assert_moments(found: dict[str, Tensor], path: str, x: Tensor) -> None:
    """Compare the moments of a layer with its inputs, and remove them."""
    squares = (x - x.mean(0)).square().sum(0)
    torch.testing.assert_close(found.pop(f"{path}.mean"), x.mean(0))
    torch.testing.assert_close(found.pop(f"{path}.m2"), squares)


def test_with_the_forward_of_the_training_they_are_measured(datasets) -> None:
    data, net = datasets[0], Autoencoder().train()
    found = measured(net, Autoencoder(), data, forward=Autoencoder.decoded)
    hidden = net.decoder[0](net(data.inputs)).detach()
    assert_moments(found, "decoder.1", hidden)


class Around(nn.Module):
    """A user's module around the network, with a BatchNorm layer of its own."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.own = nn.BatchNorm1d(3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.network(x))


@pytest.mark.parametrize("around", [lambda net: net, Around])
@pytest.mark.parametrize("fixed", ["", "1"])
@pytest.mark.parametrize("chosen", [["1"], ["4"], ["1", "4"], []])
def test_the_layers_of_the_strategy_are_measured_and_no_others(
    datasets, chosen, fixed, around
) -> None:
    """All others normalise by their running statistics in this pass.

    The answer has the server's names, even in a user's module around the network.
    """
    data, net = datasets[0], two_layers()
    net[1].running_mean += 0.3
    names = [name for name in net.state_dict() if fixed and name.startswith(fixed)]
    found = measured(net, around(two_layers()), data, *chosen, fixed=tuple(names))
    x = data.inputs
    for path, layer in net.eval().named_children():
        if path in (chosen or ["1", "4"]) and path != fixed:
            assert_moments(found, path, x)
            layer.train()
        x = layer(x).detach()
    assert not [name for name in found if name.endswith((".mean", ".m2"))]
