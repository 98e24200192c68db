"""Training loops as users of Flower write them.

They use nothing of this package, one line of it, or all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from torch import nn
from torch.nn import functional as F

from fedbn_flwr.mods import bn_rules
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.training.randomness import torch_generator
from tests.support.federation import SEED

SIZES, BATCH = (6, 8, 10), 4
Loop = Callable[[nn.Module, Any, Message, Context], float]


def batches(
    data: Any, msg: Message, context: Context
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches of ``TorchClient``, from the same random numbers."""
    return batches_of_round(data, int(msg.content["config"]["server-round"]), context)


def batches_of_round(
    data: Any, server_round: int, context: Context
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    key = int(context.node_config["partition-id"])
    generator = torch_generator(SEED, "batches", server_round, key)
    for positions in LocalTraining(
        learning_rate=LearningRate(0.1), batch_size=BATCH
    ).batches(len(data), generator):
        yield data.batch(positions)


def plain_loop(model: nn.Module, data: Any, msg: Message, context: Context) -> float:
    """Train without this package."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.train()
    total = 0.0
    for inputs, targets in batches(data, msg, context):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * len(inputs)
    return total / len(data)


def tested(net: nn.Module, data: Any, msg: Message) -> Message:
    """Test the received model, as Flower's PyTorch quickstart does."""
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    net.eval()
    with torch.no_grad():
        loss = float(F.cross_entropy(net(data.inputs), data.targets))
    metrics = MetricRecord({"loss": loss, "num-examples": len(data)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)


def hooked_loop(
    model: nn.Module, data: Any, msg: Message, context: Context, momentum: float = 0.0
) -> float:
    """Train with all client hooks, for the optimizer and for every step."""
    return ruled(
        model, data, msg, int(msg.content["config"]["server-round"]), context, momentum
    )


def ruled(
    model: nn.Module,
    data: Any,
    told: Any,
    server_round: int,
    context: Context,
    momentum: float = 0.0,
) -> float:
    """Train as ``hooked_loop`` does.

    ``told`` is a message or a NumPyClient's config.
    """
    total = 0.0
    with bn_rules(model, told, context) as rules:
        optimizer = rules.wrap(
            torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)
        )
        model.train()
        for inputs, targets in batches_of_round(data, server_round, context):
            optimizer.zero_grad()
            with rules.step(len(inputs)):
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(inputs)
    return total / len(data)


def loop_of_steps(
    model: nn.Module,
    batches: Any,
    rules: Any,
    learning_rate: float,
    momentum: float = 0.0,
) -> float:
    """Take the steps of a round, as ``LocalTraining(loop=...)``."""
    sgd = torch.optim.SGD(model.parameters(), learning_rate, momentum=momentum)
    optimizer, losses = rules.wrap(sgd), []
    for inputs, targets in batches:
        optimizer.zero_grad()
        with rules.step(len(targets)):
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)
