"""The networks of FedBN, FedBS and the segmentation zoo: layers, parameters, shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.models import build_model, input_shape, model_info
from fedbn_flwr.lab.models.resnet import SmallResNet
from fedbn_flwr.norms import batchnorm_places


def on_meta(
    name: str, native: tuple[int, int] = (3, 64)
) -> tuple[nn.Module, tuple[int, int]]:
    shape = input_shape(name, *native)
    with torch.device("meta"):
        return model_info(name).build(10, *shape), shape


# Counted by hand: a convolution has (in * k^2 + 1) * out, a linear layer (in + 1) *
# out, BatchNorm 2 a channel.
DIGITS = (
    (3 * 25 + 1) * 64
    + (64 * 25 + 1) * 64
    + (64 * 25 + 1) * 128
    + 6273 * 2048
    + 2049 * 512
    + 513 * 10
)
DIGITS_BN = (64, 64, 128, 2048, 512)
ALEXNET = (
    (3 * 121 + 1) * 64
    + (64 * 25 + 1) * 192
    + (192 * 9 + 1) * 384
    + (384 * 9 + 1) * 256
    + (256 * 9 + 1) * 256
)
ALEXNET += 9217 * 4096 + 4097 * 4096 + 4097 * 10
ALEXNET_BN = (64, 192, 384, 256, 256, 4096, 4096)
SMALL = (
    (3 * 25 + 1) * 32
    + (32 * 25 + 1) * 96
    + (96 * 9 + 1) * 192
    + (192 * 9 + 1) * 128
    + (128 * 9 + 1) * 128
)
SMALL += 1153 * 512 + 513 * 512 + 513 * 10
SMALL_BN = (32, 96, 192, 128, 128, 512, 512)
MNIST = (25 + 1) * 16 + (16 * 25 + 1) * 32 + 1569 * 10
CIFAR = (
    (3 * 25 + 1) * 100 + (100 * 9 + 1) * 150 + (150 * 9 + 1) * 250 + (250 * 9 + 1) * 500
)
CIFAR += 4501 * 270 + 271 * 150 + 151 * 10


@pytest.mark.parametrize(
    ("name", "entries", "channels", "total"),
    [
        ("digits-cnn", DIGITS, DIGITS_BN, 14_219_210),
        ("alexnet-bn", ALEXNET, ALEXNET_BN, 57_063_498),
        ("alexnet-bn-small", SMALL, SMALL_BN, 1_475_626),
        ("fedbs-mnist", MNIST, (16, 32), 29_034),
        ("fedbs-cifar", CIFAR, (100, 150, 250, 500), 2_865_430),
    ],
)
def test_parameters_and_norm_layers(
    name: str, entries: int, channels: tuple[int, ...], total: int
) -> None:
    model, (c, size) = on_meta(name)
    assert (
        tuple(place.layer.num_features for place in batchnorm_places(model)) == channels
    )
    assert (
        sum(p.numel() for p in model.parameters())
        == entries + 2 * sum(channels)
        == total
    )
    assert model(torch.empty(2, c, size, size, device="meta")).shape == (2, 10)


def test_two_of_the_digits_networks_norms_are_1d() -> None:
    layers = [place.layer for place in batchnorm_places(on_meta("digits-cnn")[0])]
    assert [type(layer) for layer in layers] == [nn.BatchNorm2d] * 3 + [
        nn.BatchNorm1d
    ] * 2


@pytest.mark.parametrize(
    ("depth", "parameters"), [(32, 464_154), (44, 658_586), (56, 853_018)]
)
def test_deeper_residual_networks(depth: int, parameters: int) -> None:
    """He et al. 2016, Table 6, rounds the parameters to 0.46, 0.66 and 0.85 million."""
    model, _ = on_meta(f"resnet{depth}")
    assert isinstance(model, SmallResNet)
    assert len(batchnorm_places(model)) == depth - 1
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules()) == depth
    assert sum(p.numel() for p in model.parameters()) == parameters


# (layer, operation order) of what FedBN's and FedBS's papers print, from the forward
# pass.
ORDERS = {
    "digits-cnn": "CBRM CBRM CBR LBR LBR L",
    "alexnet-bn": "CBRM CBRM CBR CBR CBRM A LBR LBR L",
    "alexnet-bn-small": "CBRM CBRM CBR CBR CBRM A LBR LBR L",
    "fedbs-mnist": "CBRM CBRM L",
    "fedbs-cifar": "CBRM CBRM CBRM CBRM LR LR L",
}
LETTERS = {
    nn.Conv2d: "C",
    nn.BatchNorm2d: "B",
    nn.BatchNorm1d: "B",
    nn.ReLU: "R",
    nn.MaxPool2d: "M",
    nn.Linear: "L",
    nn.AdaptiveAvgPool2d: "A",
}


@pytest.mark.parametrize("name", ORDERS)
def test_order_of_the_layers(name: str) -> None:
    model, (c, size) = on_meta(name)
    seen: list[str] = []
    for module in model.modules():
        if type(module) in LETTERS:
            module.register_forward_hook(lambda m, *_: seen.append(LETTERS[type(m)]))
    model(torch.empty(2, c, size, size, device="meta"))
    assert "".join(seen) == ORDERS[name].replace(" ", "")


def test_options_of_norms_reach_the_layers_that_take_them() -> None:
    settings = {"num_classes": 10, "channels": 1, "size": 28}
    options = {
        "gain": True,
        "activation": "tanh",
        "rmax": 2.0,
        "dmax": 1.0,
        "warmup_steps": 7,
    }
    model = build_model("lenet", norm="batch-renorm", norm_options=options, **settings)
    assert (model.norm1.rmax, model.norm1.dmax, model.norm1.warmup_steps) == (
        2.0,
        1.0,
        7,
    )
    model = build_model("lenet", norm="wsconv", norm_options=options, **settings)
    assert model.conv1.gain is not None
    assert model.conv1.gamma == pytest.approx(1.5925, abs=1e-4)
    assert (
        build_model(
            "lenet", norm="group+ws", norm_options=options, norm_groups=1, **settings
        ).norm1.num_groups
        == 1
    )
    with pytest.raises(ConfigError, match="'rmax'"):
        build_model("lenet", norm="batch", norm_options={"rmx": 2}, **settings)


@pytest.mark.parametrize(
    "name", ["deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"]
)
def test_segmenters_return_logits_for_every_pixel(name: str) -> None:
    model = build_model(f"torchvision-seg:{name}", num_classes=4, channels=3, size=64)
    assert model.training
    logits = model(torch.zeros(2, 3, 64, 64))
    assert type(logits) is torch.Tensor
    assert logits.shape == (2, 4, 64, 64)
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
