"""Models that a norm cannot change are refused, with the layer and the remedy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision.models
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.lab.models.resnet import SmallResNet
from fedbn_flwr.norms import NORMS, replace_norm, use_feature_norm


class Relu(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Called(nn.BatchNorm2d):
    """A BatchNorm that adds a ReLU in its call and not in its forward pass."""

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs).relu()


class OwnConv(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class PreActivation(nn.Module):
    """A block with the order bn1, conv1, bn2, conv2."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.bn2, self.conv2 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.bn2(self.conv1(self.bn1(x)))) + x


class NormFirst(PreActivation):
    """A block with the last norm in the right place, but not the first."""

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(self.conv1(self.bn1(x)))) + x


class Plain(PreActivation):
    """The right order without a shortcut."""

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(self.bn1(self.conv1(x))))


class TwoHeads(nn.Module):
    """A network whose outputs come from two layers, followed by an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 2)
        self.unused = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x), self.second(x)], 1)


def norm(**changes: Any) -> nn.Module:
    """Return a BatchNorm with other attributes."""
    layer = nn.BatchNorm2d(4)
    for name, value in changes.items():
        setattr(layer, name, value)
    return layer


def hooked(kind: str) -> nn.Module:
    layer = norm()
    getattr(layer, f"register_{kind}")(lambda *_: None)
    return layer


def conv(layer: nn.Module) -> nn.Module:
    """Return a network with a convolution at the path 0.0 and a norm behind it."""
    return nn.Sequential(nn.Sequential(layer), nn.BatchNorm2d(4))


def patched_conv() -> nn.Module:
    layer = nn.Conv2d(3, 4, 1)
    layer.forward = layer._conv_forward  # type: ignore[method-assign]
    return layer


def resnet(head: nn.Module) -> nn.Module:
    model = SmallResNet(8, 5, 3)
    model.fc = head
    return model


def two_stems() -> nn.Module:
    model = resnet(nn.Linear(64, 5))
    width = model.conv.out_channels
    more = nn.BatchNorm2d(width), nn.Conv2d(width, width, 1)
    model.conv = nn.Sequential(model.conv, *more)
    return model


def inner(layer: nn.Module) -> nn.Module:
    """Return a network with a layer at the path 1.0."""
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(layer))


LOST = r"other than normalising .*: 1\.0 \(.*Move them into a layer after"
UNUSUAL = r"standardisation .* layers: 0\.0 \(.*Use torch's plain layers"
NO_BLOCK = "for residual networks .* is not one: .*no block.* Use another norm"
WIDTHS = nn.Sequential(nn.BatchNorm2d(6), nn.BatchNorm2d(8), nn.BatchNorm2d(10))
weight_norm, spectral_norm = parametrizations.weight_norm, nn.utils.spectral_norm
ALL = " ".join(NORMS)


def each(around: Any, kinds: str, words: str, layers: dict[str, Any]) -> dict[str, Any]:
    """Return the cases of layers that are refused in a network for the same reason."""
    return {
        name: (functools.partial(around, layer), kinds, words)
        for name, layer in layers.items()
    }


LAYERS = {
    "own forward": Relu(4),
    "own call": Called(4),
    "patched": norm(forward=torch.relu),
    "a hook": hooked("forward_hook"),
    "a pre-hook": hooked("forward_pre_hook"),
    "a module inside": norm(act=nn.ReLU()),
    "parametrized": weight_norm(norm(), dim=None),
}
UNUSUAL_CONVOLUTIONS = {
    "own convolution": OwnConv(3, 4, 1),
    "patched convolution": patched_conv(),
    "weight norm": weight_norm(nn.Conv2d(3, 4, 1)),
    "old spectral norm": spectral_norm(nn.Conv2d(3, 4, 1)),
}
# The model, the norms, and words of the error.
REFUSED = {
    **each(inner, "group none", LOST, LAYERS),
    **each(conv, "group+ws wsconv", UNUSUAL, UNUSUAL_CONVOLUTIONS),
    "lazy": (
        lambda: inner(nn.LazyBatchNorm2d()),
        *(ALL, r"1\.0 \(LazyBatchNorm2d\).*Run one batch"),
    ),
    "norm before": (PreActivation, "fixup", NO_BLOCK),
    "norm first": (NormFirst, "fixup", NO_BLOCK),
    "no shortcut": (Plain, "fixup", NO_BLOCK),
    "a layer": (norm, "fixup", NO_BLOCK),
    "no residual block": (torchvision.models.mobilenet_v2, "fixup", NO_BLOCK),
    "two stems": (two_stems, "fixup", "nor after the stem's convolution: norm"),
    "no head": (lambda: resnet(nn.Identity()), "fixup", "no linear classifier"),
    "a stray norm": (
        lambda: resnet(nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 5))),
        *("fixup", "neither in a residual block nor after the stem's .*: fc.0"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_a_norm_cannot_change_is_refused(name: str) -> None:
    make, kinds, words = REFUSED[name]
    for kind in kinds.split():
        with pytest.raises(NormLayerError, match=words):
            replace_norm(make(), kind, in_place=True)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: replace_norm(WIDTHS, "group", groups=4),
            r"by 4 in 0 \(6 channels\), 2 \(10 channels\)\. .* every layer: 1, 2\.",
        ),
        (
            lambda: use_feature_norm(nn.Conv2d(3, 5, 1)),
            "is a Conv2d. Only the input of a plain Linear",
        ),
        (
            lambda: use_feature_norm(TwoHeads(), num_classes=5),
            r"'unused', makes 4 outputs, .*\. Use",
        ),
        (
            lambda: use_feature_norm(
                replace_norm(resnet(nn.Linear(64, 5)), "fixup")[0]
            ),
            r"the classifier of .*, 'fc', is a BiasedLinear",
        ),
    ],
)
def test_a_setting_or_a_classifier_that_does_not_fit_is_refused(
    call: Callable[[], object], words: str
) -> None:
    with pytest.raises(NormLayerError, match=words):
        call()
