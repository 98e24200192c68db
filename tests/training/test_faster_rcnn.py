"""torchvision's Faster R-CNN is a user's task with lists of images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

from fedbn_flwr import InProcessGrid, TorchClient, client_app
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.messages.records import to_record, to_state
from fedbn_flwr.strategies import FedAvg, FixBN
from fedbn_flwr.training import LearningRate, LocalTraining, OwnTask, batches_of
from fedbn_flwr.training.randomness import derive_seed, seed_generators, torch_generator

pytestmark = pytest.mark.slow
RATE, SIZES, ROUNDS = 1e-3, (4, 6), 2


def build() -> nn.Module:
    torch.manual_seed(0)
    options = {"min_size": 48, "max_size": 64, "num_classes": 2}
    net = fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, **options
    )
    return net.double()


def example(client: int, at: int) -> Any:
    draw = torch.Generator().manual_seed(100 * client + at)
    image = torch.rand(3, 40 + at, 50 - at, generator=draw, dtype=torch.float64)
    box = [[4.0, 6.0, 20.0 + at, 24.0]] * (at % 2 + 1)
    labels = torch.ones(len(box), dtype=torch.int64)
    return image, {"boxes": torch.tensor(box, dtype=torch.float64), "labels": labels}


def together(pairs: list[Any]) -> Any:
    return [x for x, _ in pairs], [y for _, y in pairs]


def loss(model: nn.Module, images: Any, targets: Any) -> Tensor:
    return sum(model(images, targets).values())


def count(model: nn.Module, batches: Any) -> dict[str, float]:
    return {"boxes": sum(len(one["boxes"]) for x, _ in batches for one in model(x))}


TASK = OwnTask(
    "boxes",
    loss=loss,
    test=count,
    score="boxes",
    higher_is_better=True,
    loss_in_train_mode=True,
)
TRAINING = LocalTraining(learning_rate=LearningRate(RATE), batch_size=2, local_epochs=1)


def client(context: Any) -> TorchClient:
    number = int(context.node_config["partition-id"])
    data = [example(number, at) for at in range(SIZES[number])]
    batches = batches_of(DataLoader(data, collate_fn=together))
    options = {"context": context, "seed": 0, "task": TASK}
    return TorchClient(build, batches, batches, TRAINING, **options)


def run(strategy: Any, workers: int = 0) -> Any:
    state = to_record(to_state(build().state_dict()))
    with InProcessGrid(client_app(client), 2, workers=workers) as grid:
        result = strategy.start(grid, state, num_rounds=ROUNDS)
    return {name: torch.from_numpy(a.numpy()) for name, a in result.arrays.items()}


def by_hand() -> dict[str, Tensor]:
    state = build().state_dict()
    for server_round in range(1, ROUNDS + 1):
        trained = []
        for number, size in enumerate(SIZES):
            model = build()
            model.load_state_dict(state)
            optimizer = torch.optim.SGD(model.parameters(), RATE)
            order = torch_generator(0, "batches", server_round, number)
            # the proposals and the balanced samples are drawn as dropout is
            seed_generators(derive_seed(0, "dropout", server_round, number))
            for positions in TRAINING.batches(size, order):
                optimizer.zero_grad()
                batch = together([example(number, int(at)) for at in positions])
                loss(model, *batch).backward()
                optimizer.step()
            trained.append(model.state_dict())
        for name, entry in state.items():
            if entry.is_floating_point():
                pairs = zip(SIZES, trained, strict=True)
                state[name] = sum(n / sum(SIZES) * one[name] for n, one in pairs)
    return state


def test_federated_averaging_equals_a_loop_by_hand() -> None:
    strategy = FedAvg(parts=split_state(build()))
    found = run(strategy)
    for name, entry in by_hand().items():
        if entry.is_floating_point():
            torch.testing.assert_close(found[name], entry, rtol=1e-9, atol=1e-12)
    again = run(FedAvg(parts=split_state(build())), workers=2)
    assert all(torch.equal(found[name], again[name]) for name in found)
    for report in strategy.reports:  # counters are also sent
        size = sum(entry.nbytes for entry in found.values())
        floats = sum(e.nbytes for e in found.values() if e.is_floating_point())
        assert report.train.down in (size, floats)
        assert report.train.up in (2 * size, 2 * floats)


def test_what_does_not_train_keeps_its_bits() -> None:
    start = build().state_dict()
    found = run(FedAvg(parts=split_state(build()), train_only="norms,roi_heads"))
    parts = split_state(build())
    moved = {*parts.affine, *parts.statistics, *parts.counters}
    for name, entry in start.items():
        if name not in moved and not name.startswith("roi_heads"):
            assert torch.equal(found[name], entry), name
    fixed = run(FixBN(parts=split_state(build()), freeze_at=1))
    once = run(FedAvg(parts=split_state(build())))
    for name in parts.statistics:
        assert not torch.equal(fixed[name], start[name])
        assert not torch.equal(fixed[name], once[name])
