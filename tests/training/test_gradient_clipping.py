"""Adaptive gradient clipping against its formula and timm's function."""

from __future__ import annotations

import math

import pytest
import torch
import torchvision.models
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from fedbn_flwr.training.gradient_clipping import (
    clip_gradients,
    exclude_head,
)

SHAPES = [(4, 3, 2, 2), (5, 3), (4, 1, 1, 1), (6,), (1,), ()]


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """Return weights and gradients of many sizes with zero and clipped units."""
    random = torch.Generator().manual_seed(0)
    made = []
    for shape in SHAPES:
        weight = torch.randn(shape, generator=random, dtype=torch.float64)
        gradient = torch.randn(shape, generator=random, dtype=torch.float64)
        if len(shape) > 1:
            weight[0] = weight[3] = 0
            gradient[1] = 0
            gradient[2] *= 1e-3
            gradient[3] *= 1e-7
        parameter = nn.Parameter(weight.to(dtype))
        parameter.grad = gradient.to(dtype)
        made.append(parameter)
    return made


def reference(weight: Tensor, gradient: Tensor, clipping: float) -> Tensor:
    """Clip one unit after another, with each vector as one unit."""
    if weight.dim() <= 1:
        return reference_of_unit(weight, gradient, clipping)
    units = zip(weight, gradient, strict=True)
    return torch.stack([reference_of_unit(w, g, clipping) for w, g in units])


def reference_of_unit(w: Tensor, g: Tensor, clipping: float) -> Tensor:
    allowed = clipping * max(math.sqrt(float((w * w).sum())), 1e-3)
    norm = math.sqrt(float((g * g).sum()))
    return g * (allowed / max(norm, 1e-6)) if norm > allowed else g


@pytest.mark.parametrize("clipping", [1e-5, 0.01, 0.1, 2.0, 1e9])
def test_equals_the_formula(clipping: float) -> None:
    """Short gradients keep their bits, and a missing gradient is skipped."""
    given = parameters()
    want = [reference(p.detach(), p.grad, clipping) for p in given]
    values = [p.detach().clone() for p in given]
    clip_gradients([nn.Parameter(torch.ones(2)), *given], clipping)
    changed = 0
    for parameter, value, wanted, before in zip(
        given, values, want, parameters(), strict=True
    ):
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-13, atol=1e-16)
        assert torch.equal(parameter.detach(), value), "the weights do not change"
        changed += not torch.equal(parameter.grad, before.grad)
    assert (changed > 0) == (clipping < 1e9)


class Chain(nn.Module):
    """Layers with as many outputs as classes, with the last layer as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.middle = nn.Linear(3, 3)
        self.last = nn.Linear(3, 3)


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
        (lambda: Chain(), ["last.weight", "last.bias"]),
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
        model: nn.Module = make()  # type: ignore[operator]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(parameter)] for parameter in exclude_head(model)] == head
