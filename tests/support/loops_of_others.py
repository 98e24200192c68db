"""Training loops of other libraries, compared with our client."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.mods import answer_query, bn_mod, bn_rules
from fedbn_flwr.strategies import FedBN, FedProx, FedTAN, FixBN
from fedbn_flwr.training import LearningRate, LocalTraining


@dataclass
class Pictures:
    """Three batches of eight, for any loop."""

    inputs: torch.Tensor
    targets: torch.Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, positions: torch.Tensor, generator: torch.Generator | None = None):
        return self.inputs[positions], self.targets[positions]

    def loader(self) -> DataLoader:
        return DataLoader(TensorDataset(self.inputs, self.targets), 8)


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
    plain: Callable[[], nn.Module],
    loop: Any,
    same_bits: Any,
) -> None:
    """Check that a loop ends in the bits of our client after two rounds.

    The loop, ``loop(net, loader, rules)``, trains ``model``, and our client ``plain``.
    """

    def pictures(context: Any) -> Pictures:
        generator = torch.Generator().manual_seed(
            i := int(context.node_config["partition-id"])
        )
        return Pictures(
            (1 + i) * torch.randn(24, 3, 32, 32, generator=generator),
            torch.arange(24) % 3,
        )

    app = ClientApp(mods=[bn_mod])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        with torch.random.fork_rng():
            net, data = model(), pictures(context)
        net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        with bn_rules(net, msg, context) as rules:
            loop(net, data.loader(), rules)
        arrays, metrics = (
            ArrayRecord(net.state_dict()),
            MetricRecord({"num-examples": len(data)}),
        )
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)

    @app.query()
    def query(msg: Message, context: Context) -> Message:
        return answer_query(
            msg, context, SimpleNamespace(dataset=pictures(context), batch_size=8)
        )

    def client_fn(context: Context) -> TorchClient:
        with torch.random.fork_rng():
            net, data = plain(), pictures(context)
        return TorchClient(
            net,
            data,
            data,
            InOrder(learning_rate=LearningRate(0.1), batch_size=8),
            context=context,
        )

    torch.manual_seed(0)
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
