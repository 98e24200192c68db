"""Gradients are clipped in all layers but the last layer of the head."""

from __future__ import annotations

import math

import pytest
import torch
import torchvision.models
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.training.gradient_clipping import (
    clip_gradients,
    exclude_head,
)


@pytest.mark.parametrize(
    ("make", "head"),
    [
        (torchvision.models.mobilenet_v2, ["classifier.1.weight", "classifier.1.bias"]),
        (
            torchvision.models.squeezenet1_0,
            ["classifier.1.weight", "classifier.1.bias"],
        ),
        (
            lambda: nn.Sequential(
                nn.Linear(2, 3),
                nn.BatchNorm1d(3),
                nn.Linear(3, 2, bias=False),
                nn.ReLU(),
            ),
            ["2.weight"],
        ),
        (lambda: nn.BatchNorm1d(3), []),
        (
            lambda: nn.ModuleDict({"fc": nn.Linear(3, 2), "body": nn.Linear(3, 3)}),
            ["fc.weight", "fc.bias"],
        ),
        (
            # Layers with as many outputs as classes, with the last layer as the head.
            lambda: nn.ModuleDict(
                {"b": nn.Linear(5, 3), "a": nn.Linear(3, 3), "last": nn.Linear(3, 3)}
            ),
            ["last.weight", "last.bias"],
        ),
        (torchvision.models.vgg11, ["classifier.6.weight", "classifier.6.bias"]),
        (
            lambda: nn.Sequential(weight_norm(nn.Linear(3, 4))),
            [
                "0.bias",
                "0.parametrizations.weight.original0",
                "0.parametrizations.weight.original1",
            ],
        ),
        (lambda: nn.Linear(3, 4), ["weight"]),
    ],
)
def test_the_last_layer_of_the_head_is_not_clipped(
    make: object, head: list[str]
) -> None:
    with torch.device("meta"):
        model = make()  # type: ignore[operator]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(parameter)] for parameter in exclude_head(model)] == head


def test_a_unit_of_zero_is_clipped_like_one_of_norm_0_001() -> None:
    parameter = nn.Parameter(torch.zeros(1, 2))
    parameter.grad = torch.tensor([[3.0, 4.0]])
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="finite number"):
            clip_gradients([parameter], wrong)
    clip_gradients([parameter], 0.5)
    assert parameter.grad.norm().item() == pytest.approx(5e-4)
