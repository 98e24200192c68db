"""Training loops of other libraries, compared with our client."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedbn_flwr.client import client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.mods import answer_query, bn_mod, bn_rules
from fedbn_flwr.strategies import FedBN, FedProx, FedTAN, FixBN
from fedbn_flwr.training import LearningRate, LocalTraining
from tests.support.federation import torch_clients
from tests.support.points import Points
from tests.support.seeds import with_seed
from tests.support.synchronised import client_data


class InOrder(LocalTraining):
    def batches(
        self, num_examples: int, generator: torch.Generator
    ) -> Iterator[torch.Tensor]:
        yield from torch.arange(num_examples).split(8)


METHODS = {
    "fedbn": FedBN,
    "fixbn": functools.partial(FixBN, freeze_at=1),
    "fedprox": functools.partial(FedProx, proximal_mu=0.3),
    "fedtan": FedTAN,
}


def compare_with_ours(
    method: str,
    model: Callable[[], nn.Module],
    loop: Any,
    same_bits: Any,
) -> None:
    """Check that a loop ends in the bits of our client after two rounds.

    The loop, ``loop(net, loader, rules)``, trains ``model``, as our client does.
    """
    model = with_seed()(model)
    # three batches of eight
    pictures = client_data((3, 32, 32), (24, 24), dtype=torch.float32)

    def pictures_of(context: Context) -> Points:
        return pictures[context.node_config["partition-id"]]

    app = ClientApp(mods=[bn_mod])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        net, data = model(), pictures_of(context)
        net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        with bn_rules(net, msg, context) as rules:
            loop(net, DataLoader(TensorDataset(data.inputs, data.targets), 8), rules)
        arrays, metrics = (
            ArrayRecord(net.state_dict()),
            MetricRecord({"num-examples": len(data)}),
        )
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)

    @app.query()
    def query(msg: Message, context: Context) -> Message:
        about = SimpleNamespace(dataset=pictures_of(context), batch_size=8)
        return answer_query(msg, context, about)

    settings = InOrder(learning_rate=LearningRate(0.1), batch_size=8)
    client_fn = torch_clients(model, pictures, settings)
    start, states = to_record(model().state_dict()), []
    for made in (app, client_app(client_fn)):
        strategy = METHODS[method](fraction_evaluate=0.0)
        with InProcessGrid(made, 2, threads=2) as grid:
            states.append(
                from_record(
                    strategy.start(grid=grid, initial_arrays=start, num_rounds=2).arrays
                )
            )
        assert [report.rejected for report in strategy.reports] == [{}, {}]
    same_bits(*states)
