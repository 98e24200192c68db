"""The networks of FedBN and FedBS in ``studies/networks.py`` match their papers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from fedbn_flwr.lab.models import model_info
from fedbn_flwr.norms import batchnorm_places

# the images of the data sets that the studies use
SHAPES = {"DigitsCNN": (3, 28), "fedbs_mnist": (1, 28), "fedbs_cifar": (3, 32)}


# Convolutions (channels, size of the kernel, filters), widths of the linear layers,
# channels of BatchNorm, and the order of the layers as the papers print it.
NETWORKS = {
    "DigitsCNN": (
        [(3, 5, 64), (64, 5, 64), (64, 5, 128)],
        [6272, 2048, 512, 10],
        [64, 64, 128, 2048, 512],
        "CBRM CBRM CBR LBR LBR L",
    ),
    "alexnet_bn": (
        [(3, 11, 64), (64, 5, 192), (192, 3, 384), (384, 3, 256), (256, 3, 256)],
        [9216, 4096, 4096, 10],
        [64, 192, 384, 256, 256, 4096, 4096],
        "CBRM CBRM CBR CBR CBRM A LBR LBR L",
    ),
    "alexnet_bn_small": (
        [(3, 5, 32), (32, 5, 96), (96, 3, 192), (192, 3, 128), (128, 3, 128)],
        [1152, 512, 512, 10],
        [32, 96, 192, 128, 128, 512, 512],
        "CBRM CBRM CBR CBR CBRM A LBR LBR L",
    ),
    "fedbs_mnist": (
        [(1, 5, 16), (16, 5, 32)],
        [1568, 10],
        [16, 32],
        "CBRM CBRM L",
    ),
    "fedbs_cifar": (
        [(3, 5, 100), (100, 3, 150), (150, 3, 250), (250, 3, 500)],
        [4500, 270, 150, 10],
        [100, 150, 250, 500],
        "CBRM CBRM CBRM CBRM LR LR L",
    ),
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


@pytest.mark.parametrize("name", NETWORKS)
def test_layers_and_parameters_are_those_of_the_papers(name: str) -> None:
    """The parameters were counted by hand.

    A filter has a bias, and BatchNorm has two parameters for each channel.
    """
    convolutions, widths, channels, order = NETWORKS[name]
    c, size = SHAPES.get(name, (3, 64))
    with torch.device("meta"):
        model = model_info(f"studies.networks:{name}").build(10, c, size)
    parameters = 2 * sum(channels)
    for inputs, kernel, filters in convolutions:
        parameters += (inputs * kernel**2 + 1) * filters
    for inputs, outputs in pairwise(widths):
        parameters += (inputs + 1) * outputs
    assert sum(p.numel() for p in model.parameters()) == parameters
    found = [place.layer.num_features for place in batchnorm_places(model)]
    assert found == channels
    seen = []
    for module in model.modules():
        if type(module) in LETTERS:
            module.register_forward_hook(lambda m, *_: seen.append(LETTERS[type(m)]))
    logits = model(torch.empty(2, c, size, size, device="meta"))
    assert logits.shape == (2, 10)
    assert "".join(seen) == order.replace(" ", "")
