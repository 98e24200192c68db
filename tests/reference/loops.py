"""A user's own training loop behind the mod, in several ways to write it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedbn_flwr.mods import answer_query, answer_statistics, bn_mod, bn_rules
from tests.reference.federation import UNMEASURED, optimizer_of, stream
from tests.support import user_loops


class Around(nn.Module):
    """A user's module around the network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def app(
    case: Any,
    make: Any,
    datasets: Any,
    training: Any,
    faults: Mapping[tuple[int, int], str],
    losing: Any,
) -> ClientApp:
    """Return Flower's quickstart app with the lines of this package."""
    app = ClientApp(mods=[losing, bn_mod])

    def data_of(context: Context):
        return datasets[int(context.node_config["partition-id"])]

    def loader(context: Context) -> DataLoader:
        data = data_of(context)
        size = case.batch_size or len(data)
        return DataLoader(TensorDataset(data.inputs, data.targets), size)

    def fault_of(msg: Message, context: Context) -> tuple[int, str]:
        number = int(msg.content["config"]["server-round"])
        place = number, int(context.node_config["partition-id"])
        return number, faults.get(place, "")

    @(app.train("local") if case.way == "named" else app.train())
    def train(msg: Message, context: Context) -> Message:
        net, data = make(), data_of(context)
        number, fault = fault_of(msg, context)
        if fault == "raise":
            raise RuntimeError("as the case asks")
        net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        loss = fit(case, net, data, loader(context), training, msg, context, number)
        state = net.state_dict()
        if fault == "nan":
            state = {
                n: v * torch.nan if v.is_floating_point() else v
                for n, v in state.items()
            }
        metrics = MetricRecord({"train-loss": loss, "num-examples": len(data)})
        content = {"arrays": ArrayRecord(state), "metrics": metrics}
        return Message(RecordDict(content), reply_to=msg)

    app.query("exchange")(train)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        return user_loops.tested(make(), data_of(context), msg)

    @app.query("statistics")
    def statistics(msg: Message, context: Context) -> Message:
        if fault_of(msg, context)[1] == UNMEASURED:
            raise RuntimeError("as the case asks")
        return answer_statistics(msg, context, make, loader(context))

    @app.query()
    def answer(msg: Message, context: Context) -> Message:
        size = case.batch_size or len(data_of(context))
        about = SimpleNamespace(dataset=data_of(context), batch_size=size)
        return answer_query(msg, context, about)

    return app


def fit(
    case: Any,
    net: nn.Module,
    data: Any,
    loader: Any,
    training: Any,
    msg: Message,
    context: Context,
    number: int,
) -> float:
    """Train for a round and return the mean loss."""
    partition = int(context.node_config["partition-id"])
    generator = torch.Generator().manual_seed(
        stream(case.client_seed, "batches", number, partition)
    )
    model = Around(net) if case.way == "around" else net
    config = msg.content["config"]
    total = count = 0.0
    with bn_rules(model, msg, context) as rules:
        frozen = bool(config.get("fedbn-flwr.frozen", False))
        rate = training.learning_rate.at(number, frozen)
        optimizers = [rules.wrap(one) for one in optimizers_of(case, net, rate)]
        model.train()
        for positions in training.batches(len(data), generator):
            x, y = data.batch(positions)

            def passes(x: Tensor = x, y: Tensor = y) -> Tensor:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                with rules.step(len(x)):
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                return loss

            if case.way == "closure":
                loss = optimizers[0].step(passes)
            else:
                loss = passes()
                for optimizer in optimizers:
                    optimizer.step()
            total, count = total + float(loss.detach()) * len(x), count + len(x)
    return total / count


def optimizers_of(case: Any, net: nn.Module, rate: float) -> list:
    """Return one optimizer, or one each for the classifier and the rest."""
    named = dict(net.named_parameters())  # including frozen parameters
    if case.way != "two-optimizers":
        return [optimizer_of(case, named.values(), rate)]
    head = [p for n, p in named.items() if n.startswith("head.")]
    rest = [p for n, p in named.items() if not n.startswith("head.")]
    return [optimizer_of(case, some, rate) for some in (rest, head)]
