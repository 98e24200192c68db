"""A model whose ``forward`` reaches only a part of its BatchNorm.

An example is a Lightning autoencoder whose ``forward`` encodes.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedbn_flwr.mods import answer_query, answer_statistics, bn_mod, bn_rules
from fedbn_flwr.strategies import FedAvg, StaticBN
from tests.support.user_loops import SIZES

HIDDEN = 3
DECODER = ("decoder.1.running_mean", "decoder.1.running_var")


class Autoencoder(nn.Module):
    """An autoencoder that encodes in ``forward`` and also decodes in training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(
            nn.Linear(5, HIDDEN), nn.BatchNorm1d(HIDDEN)
        ).double()
        self.decoder = nn.Sequential(nn.Linear(HIDDEN, 5), nn.BatchNorm1d(5)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def decoded(self, x: Tensor) -> Tensor:
        return self.decoder(self(x))


@pytest.fixture
def app(datasets) -> Any:
    """``app(whole)`` makes an app that trains the autoencoder.

    If ``whole`` is true, its passes over the data also decode.
    """

    def make(whole: bool) -> ClientApp:
        app = ClientApp(mods=[bn_mod])

        def loader(context: Context) -> Any:
            data = datasets[int(context.node_config["partition-id"])]
            return DataLoader(TensorDataset(data.inputs, data.targets), len(data))

        @app.query()
        def query(msg: Message, context: Context) -> Message:
            return answer_query(msg, context, loader(context))

        @app.query("statistics")
        def statistics(msg: Message, context: Context) -> Message:
            net = Autoencoder()
            further = {"forward": Autoencoder.decoded} if whole else {}
            return answer_statistics(msg, context, net, loader(context), **further)

        @app.train()
        def train(msg: Message, context: Context) -> Message:
            net, data = Autoencoder(), loader(context)
            net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
            with bn_rules(net, msg, context) as rules:
                optimizer = rules.wrap(torch.optim.SGD(net.parameters(), 0.01))
                net.train()
                for inputs, _ in data:
                    optimizer.zero_grad()
                    (net.decoded(inputs) - inputs).square().mean().backward()
                    optimizer.step()
            metrics = MetricRecord({"num-examples": len(data.dataset)})
            return Message(
                RecordDict(
                    {"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}
                ),
                reply_to=msg,
            )

        return app

    return make


METHODS = {
    "staticbn": StaticBN,
    "recalibrate": functools.partial(FedAvg, recalibrate=True),
}


@pytest.mark.parametrize("name", METHODS)
def test_layers_that_the_pass_does_not_reach_are_named_once(
    app, run_app, caplog, name: str
) -> None:
    run_app(
        METHODS[name](fraction_evaluate=0.0), app(False), model=Autoencoder, rounds=2
    )
    (told,) = [text for text in caplog.messages if "no reply has moments" in text]
    assert "of decoder.1, " in told
    assert "forward=f" in told


@pytest.mark.parametrize("name", METHODS)
def test_with_the_forward_of_the_training_they_are_measured(
    app, run_app, datasets, caplog, name: str
) -> None:
    """The statistics after round 1 fit the weights that the method measures.

    These are the weights before or after the training.
    """
    run = run_app(
        METHODS[name](fraction_evaluate=0.0), app(True), model=Autoencoder, rounds=1
    )
    assert "no reply has moments" not in caplog.text
    net = Autoencoder()
    if name in ("staticbn", "recalibrate"):
        net.load_state_dict(run.tensors)
    hidden = []
    with torch.no_grad():  # each client is one batch with its own statistics
        for data in datasets:
            net.train()
            hidden.append(net.decoder[0](net.encoder(data.inputs)))
    union = torch.cat(hidden)
    assert len(union) == sum(SIZES)
    for entry, want in zip(DECODER, (union.mean(0), union.var(0)), strict=True):
        torch.testing.assert_close(run.tensors[entry], want, rtol=1e-12, atol=1e-14)
