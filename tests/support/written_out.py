"""Rounds written out in plain torch, on networks of torchvision in float64."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import VisionTransformer

from fedbn_flwr.messages.records import to_state
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.training.randomness import torch_generator
from tests.support.federation import SEED
from tests.support.small_vision import VISION
from tests.support.user_loops import BATCH, SIZES

State = dict[str, np.ndarray]


def network(name: str = "densenet", classes: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "vit":
            return VisionTransformer(16, 8, 2, 2, 8, 16, num_classes=classes).double()
        return VISION[name](num_classes=classes).double()


def below(model: nn.Module, *prefixes: str) -> set[str]:
    return {name for name in model.state_dict() if name.startswith(prefixes)}


def numbers(model: nn.Module) -> State:
    return {name: a.copy() for name, a in to_state(model.state_dict()).items()}


def loaded(build: Callable[[], nn.Module], state: State) -> nn.Module:
    model = build()
    model.load_state_dict({name: torch.tensor(array) for name, array in state.items()})
    return model


def steps(data: Any, server_round: int, client: int, **settings: Any) -> Any:
    """The batches of a client's round; ``settings`` of ``LocalTraining``."""
    generator = torch_generator(SEED, "batches", server_round, client)
    training = LocalTraining(
        learning_rate=LearningRate(0.1), **{"batch_size": BATCH, **settings}
    )
    for positions in training.batches(len(data), generator):
        yield data.batch(positions)


def sgd(model: nn.Module, batches: Any, rate: float, pull: Any = None) -> State:
    """Torch's SGD; ``pull`` gives what is added to a gradient."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), rate)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        for name, p in model.named_parameters():
            if pull is not None:
                p.grad += pull(name, p.detach())
        optimizer.step()
    return numbers(model)


def mean(states: Collection[State], names: Collection[str]) -> State:
    """Sum p_i x_i in float64, and the greatest counter."""
    averaged = {}
    for name in names:
        values = [state[name] for state in states]
        if values[0].dtype.kind == "i":
            averaged[name] = max(values)
            continue
        total = sum(SIZES)
        averaged[name] = sum(n / total * x for n, x in zip(SIZES, values, strict=True))
    return averaged


def close(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, array in wanted.items():
        np.testing.assert_allclose(
            found[name], array, rtol=1e-12, atol=1e-12, err_msg=name
        )
