"""Channels-last changes the order of images in memory, and nothing else beyond rounding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torchvision.models import mobilenet_v2, resnet18

from fedbn_flwr.training import LearningRate, LocalTraining, train
from fedbn_flwr.training.memory_format import inputs_for, set_memory_format

LAST = {"memory_format": torch.channels_last}


def is_last(model: nn.Module) -> bool:
    return all(p.is_contiguous(**LAST) for p in model.parameters() if p.dim() == 4)


def test_auto_follows_the_model_and_not_the_clock() -> None:
    assert is_last(set_memory_format(resnet18(num_classes=2)))
    assert is_last(set_memory_format(resnet18(num_classes=2), "channels-last"))
    again = set_memory_format(set_memory_format(resnet18(num_classes=2)), "contiguous")
    assert all(p.is_contiguous() for p in again.parameters())
    assert not is_last(set_memory_format(resnet18(num_classes=2).double())), "no faster in float64"
    for norm in (nn.GroupNorm(4, 4), nn.InstanceNorm2d(4)):
        assert not is_last(set_memory_format(nn.Sequential(nn.Conv2d(3, 4, 3), norm))), "slower in torch"
    assert is_last(set_memory_format(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))))
    linear = nn.Linear(3, 2)
    assert set_memory_format(linear) is linear


def test_inputs_get_the_models_format() -> None:
    images = torch.rand(2, 3, 8, 8)
    assert inputs_for(set_memory_format(resnet18(num_classes=2)))(images).is_contiguous(**LAST)
    assert inputs_for(resnet18(num_classes=2))(images).is_contiguous()
    assert inputs_for(set_memory_format(resnet18(num_classes=2)))(torch.rand(4, 3)).shape == (4, 3)


@pytest.mark.parametrize("make", [resnet18, mobilenet_v2])
def test_the_format_changes_rounding_only(points, make) -> None:
    """In float64 to 1e-12 after two steps."""

    class Images:
        inputs, targets = torch.randn(8, 3, 96, 96, dtype=torch.float64), torch.randint(2, (8,))

        def __len__(self) -> int:
            return 8

        def batch(self, positions, generator=None):
            return self.inputs[positions], self.targets[positions]

    torch.manual_seed(0)
    model = make(num_classes=2).double()
    found = []
    for memory_format in ("contiguous", "channels-last"):
        own = set_memory_format(copy.deepcopy(model), memory_format)
        settings = LocalTraining(learning_rate=LearningRate(0.01), local_steps=2, batch_size=8)
        train(own, Images(), settings, learning_rate=0.01, stream=lambda purpose: torch.Generator().manual_seed(1))
        found.append(own.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-12, atol=1e-12, msg=name)
