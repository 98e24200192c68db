"""A model whose ``forward`` reaches only a part of its BatchNorm.

An example is a Lightning autoencoder whose ``forward`` encodes.
"""

from __future__ import annotations

import torch
from flwr.app import Context, Message, RecordDict
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedbn_flwr.messages.records import from_record, tensors, to_record
from fedbn_flwr.mods import answer_statistics


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


def test_with_the_forward_of_the_training_they_are_measured(datasets) -> None:
    data, net = datasets[0], Autoencoder().train()
    query = Message(
        RecordDict({"arrays": to_record(net.state_dict())}), 1, "query.statistics"
    )
    reply = answer_statistics(
        query,
        Context(1, 2, {}, RecordDict(), {}),
        Autoencoder(),
        DataLoader(TensorDataset(data.inputs, data.targets), len(data)),
        forward=Autoencoder.decoded,
    )
    hidden = net.decoder[0](net(data.inputs)).detach()
    found = tensors(from_record(reply.content["arrays"]))
    torch.testing.assert_close(found["decoder.1.mean"], hidden.mean(0))
    squares = (hidden - hidden.mean(0)).square().sum(0)
    torch.testing.assert_close(found["decoder.1.m2"], squares)
