"""A detection task has unequal images and a network with losses in train mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedbn_flwr.training import OwnTask


class Images(Dataset[Any]):
    """Images of unequal sizes with one to three boxes."""

    def __init__(self, site: int, part: str) -> None:
        self.first = 1000 * site + 500 * (part == "test")

    def __len__(self) -> int:
        return 6

    def __getitem__(self, at: int) -> Any:
        draw = torch.Generator().manual_seed(self.first + at)
        image = torch.rand(1, 8 + at % 3, 9 + at % 2, generator=draw)
        return {"image": image}, {"boxes": torch.rand(at % 3 + 1, 4, generator=draw)}


class Net(nn.Module):
    """Returns losses in train mode, and boxes in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 4)

    def forward(self, images: list[Tensor], targets: Any = None) -> Any:
        boxes = [self.head(self.body(one[None]).mean((2, 3)))[0] for one in images]
        if not self.training:
            return boxes
        pairs = zip(boxes, targets, strict=True)
        gaps = [(box - one["boxes"].mean(0)).square().mean() for box, one in pairs]
        return {"boxes": sum(gaps) / len(gaps)}


def loss(model: nn.Module, images: Any, targets: Any) -> Tensor:
    return sum(model(images, targets).values())


def test(model: nn.Module, batches: Any) -> dict[str, Tensor]:
    pairs = [pair for x, y in batches for pair in zip(model(x), y, strict=True)]
    errors = torch.stack([(box - one["boxes"]).abs().mean() for box, one in pairs])
    return {"error": errors.mean(), "largest": errors.max()}


def data(site: int, part: str) -> Images:
    return Images(int(site), part)


def together(pairs: list[Any]) -> Any:
    return [x["image"] for x, _ in pairs], [y for _, y in pairs]


def new(site: int, part: str) -> Images:
    return Images(int(site) + 10, part)


def no_pairs(site: int, part: str) -> list[int]:
    return [3, 4]


def one_collated(site: int, part: str) -> Images:
    return Images(int(site), part)


def not_collated(site: int, part: str) -> Images:
    return Images(int(site), part)


data.collate_fn = new.collate_fn = together
one_collated.collate_fn = lambda pairs: pairs[0][0]
not_collated.collate_fn = lambda pairs: pairs[0][0] / 0
KNOWN: Any = {"loss": loss, "test": test, "score": "error", "test_batch": 4}
KNOWN["loss_in_train_mode"] = True
LOW = OwnTask("low", higher_is_better=False, **KNOWN)
HIGH = OwnTask("high", higher_is_better=True, share=True, **KNOWN)
