"""Users' tasks of many kinds train and test like plain torch, written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, Dataset, default_collate

from fedbn_flwr import InProcessGrid, TorchClient, client_app
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.messages.records import to_record, to_state
from fedbn_flwr.strategies import FedAvg, FedBN, FedTAN
from fedbn_flwr.training import LearningRate, LocalTraining, OwnTask, batches_of
from fedbn_flwr.training.randomness import torch_generator

RATE, BATCH, ROUNDS, TESTED = 0.1, 4, 3, 5


def normal(client: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(client + 10 * len(shape))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values * (1 + client) + client


def sizes(client: int) -> int:
    return 8 + 4 * client


class Examples(Dataset[Any]):
    """The examples of a client, each a pair made by a function of its position."""

    def __init__(self, size: int, example: Callable[[int], Any]) -> None:
        self.size, self.example = size, example

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: int) -> Any:
        return self.example(at)


@dataclass(frozen=True)
class Kind:
    """A task with its model and data."""

    build: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    example: Callable[[int, int], Any]
    collate: Callable[[Any], Any] = default_collate
    in_train_mode: bool = False

    def data(self, client: int) -> Examples:
        return Examples(sizes(client), lambda at: self.example(client, at))

    @property
    def task(self) -> OwnTask:
        options = {"loss_in_train_mode": self.in_train_mode, "test_batch": TESTED}
        return OwnTask("kind", loss=self.loss, **options)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().double()


def rows(outputs: int) -> nn.Module:
    layers = (nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, outputs))
    return nn.Sequential(*layers)


def cox(model: nn.Module, inputs: Tensor, targets: Any) -> Tensor:
    risk, (time, event) = model(inputs).squeeze(1), targets
    order = torch.argsort(time, descending=True)
    terms = (risk[order] - risk[order].logcumsumexp(0)) * event[order]
    return -terms.sum() / event.sum().clamp(min=1)


def gaussian(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    mean, scale = model(inputs).unbind(1)
    return F.gaussian_nll_loss(mean, targets, scale.exp())


class Forecaster(nn.Module):
    """Returns (B, 6, 3) for series (B, 2, 9)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Linear(28, 18)

    def forward(self, series: Tensor) -> Tensor:
        return self.head(self.encoder(series).flatten(1)).view(-1, 6, 3)


def pinball(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    errors = targets - model(inputs)
    quantiles = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    return torch.maximum(quantiles * errors, (quantiles - 1) * errors).mean()


def autoencoder() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 5))


def contrast(model: nn.Module, inputs: Any, targets: Any) -> Tensor:
    one, other = (F.normalize(model(inputs[view])) for view in ("a", "b"))
    return F.cross_entropy(one @ other.T / 0.5, torch.arange(len(one)))


class WithTargets(nn.Module):
    """Returns its loss, as many networks for texts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = rows(1)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.net(inputs).squeeze(1)
        return {"loss": (outputs - labels).square().mean(), "outputs": outputs}


class Detector(nn.Module):
    """Returns losses in train mode and boxes in eval mode, from a list of images."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.boxes, self.score = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, images: list[Tensor], targets: Any = None) -> Any:
        pooled = [self.body(one[None]).mean((2, 3)).squeeze(0) for one in images]
        outputs = [(self.boxes(one), self.score(one)) for one in pooled]
        if not self.training:
            return [{"boxes": boxes, "scores": score} for boxes, score in outputs]
        losses = {"boxes": 0.0, "scores": 0.0}
        for (boxes, score), target in zip(outputs, targets, strict=True):
            losses["boxes"] += (boxes - target["boxes"]).abs().mean() / len(images)
            losses["scores"] += F.softplus(-score).mean() / len(images)
        return losses


def summed(model: nn.Module, images: Any, targets: Any) -> Tensor:
    return sum(model(images, targets).values())


def image(client: int, at: int) -> Any:
    picture = normal(client, 1, 6 + at % 3, 7 + at % 2)
    return picture + at / 8, {"boxes": normal(client + at, at % 3 + 1, 4)}


def of_rows(client: int, at: int) -> Tensor:
    return normal(client, sizes(client), 5)[at]


def target(client: int, at: int) -> Tensor:
    return of_rows(client, at)[0].sin()


KINDS = {
    "cox": Kind(
        lambda: rows(1),
        cox,
        lambda i, at: (of_rows(i, at), (target(i, at).exp(), float(at % 3 > 0))),
    ),
    "gaussian": Kind(
        lambda: rows(2), gaussian, lambda i, at: (of_rows(i, at), target(i, at))
    ),
    "forecast": Kind(
        Forecaster,
        pinball,
        lambda i, at: (normal(i + at, 2, 9), normal(i + at, 6, 3)),
    ),
    "autoencoder": Kind(
        autoencoder,
        lambda model, x, y: F.mse_loss(model(x), y),
        lambda i, at: (of_rows(i, at), of_rows(i, at)),
    ),
    "two views": Kind(
        lambda: rows(3),
        contrast,
        lambda i, at: ({"a": of_rows(i, at), "b": of_rows(i, at) * 1.1 + 0.1}, "none"),
    ),
    "targets in forward": Kind(
        WithTargets,
        lambda model, x, y: model(x, labels=y)["loss"],
        lambda i, at: (of_rows(i, at), target(i, at)),
    ),
    "detector": Kind(
        Detector,
        summed,
        image,
        lambda pairs: tuple(map(list, zip(*pairs, strict=True))),
        in_train_mode=True,
    ),
}


def run(kind: Kind, strategy: Any, training: LocalTraining, rounds: int) -> Any:
    def client(context: Any) -> TorchClient:
        data = kind.data(int(context.node_config["partition-id"]))
        batches = batches_of(DataLoader(data, collate_fn=kind.collate))
        options = {"context": context, "seed": 0, "task": kind.task}
        return TorchClient(kind.model, batches, batches, training, **options)

    state = to_record(to_state(kind.model().state_dict()))
    with InProcessGrid(client_app(client), 2) as grid:
        return strategy.start(grid, state, num_rounds=rounds)


def by_hand(kind: Kind, local: set[str]) -> tuple[dict[str, Tensor], float]:
    """Return the global state after three rounds, and the mean loss of its test.

    The entries in ``local`` stay with the clients.
    """
    state, own = kind.model().state_dict(), [{}, {}]
    training = LocalTraining(
        learning_rate=LearningRate(RATE), batch_size=BATCH, local_epochs=1
    )
    for server_round in range(1, ROUNDS + 1):
        trained = []
        for client in (0, 1):
            data, model = kind.data(client), kind.model()
            model.load_state_dict({**state, **own[client]})
            optimizer = torch.optim.SGD(model.parameters(), RATE)
            stream = torch_generator(0, "batches", server_round, client)
            for positions in training.batches(len(data), stream):
                optimizer.zero_grad()
                batch = kind.collate([data[int(at)] for at in positions])
                kind.loss(model, *batch).backward()
                optimizer.step()
            found = model.state_dict()
            own[client] = {name: found[name].clone() for name in local}
            trained.append(found)
        weights = [sizes(client) / (sizes(0) + sizes(1)) for client in (0, 1)]
        for name, entry in state.items():
            if entry.is_floating_point() and name not in local:
                state[name] = sum(
                    w * t[name] for w, t in zip(weights, trained, strict=True)
                )
    total = 0.0
    for client in (0, 1):
        data, model = kind.data(client), kind.model().eval()
        model.load_state_dict({**state, **own[client]})
        if kind.in_train_mode:
            for module in model.modules():
                module.training = not isinstance(module, _BatchNorm)
        for positions in torch.arange(len(data)).split(TESTED):
            with torch.no_grad():
                batch = kind.collate([data[int(at)] for at in positions])
                total += float(kind.loss(model, *batch)) * len(positions)
    return state, total / (sizes(0) + sizes(1))


@pytest.mark.parametrize("strategy", [FedAvg, FedBN])
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_equals_plain_torch(name: str, strategy: Any) -> None:
    kind = KINDS[name]
    training = LocalTraining(
        learning_rate=LearningRate(RATE), batch_size=BATCH, local_epochs=1
    )
    result = run(kind, strategy(), training, ROUNDS)
    parts, local = split_state(kind.model()), set()
    if strategy is FedBN:
        local = {*parts.affine, *parts.statistics, *parts.counters}
    state, loss = by_hand(kind, local)
    for name, entry in state.items():
        if entry.is_floating_point() and name not in local:
            found = torch.from_numpy(result.arrays[name].numpy())
            torch.testing.assert_close(found, entry, rtol=1e-12, atol=1e-12)
    tested = result.evaluate_metrics_clientapp[ROUNDS]["loss"]
    assert tested == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize(
    "name", ["gaussian", "forecast", "autoencoder", "targets in forward"]
)
def test_a_synchronised_step_equals_a_step_on_the_union(name: str) -> None:
    kind = KINDS[name]
    training = LocalTraining(
        learning_rate=LearningRate(RATE), batch_size=0, local_steps=1
    )
    result, model = run(kind, FedTAN(), training, 1), kind.model()
    union = [kind.data(client)[at] for client in (0, 1) for at in range(sizes(client))]
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    kind.loss(model, *kind.collate(union)).backward()
    optimizer.step()
    for name, entry in model.state_dict().items():
        if entry.is_floating_point():
            found = torch.from_numpy(result.arrays[name].numpy())
            torch.testing.assert_close(found, entry, rtol=1e-12, atol=1e-12)
