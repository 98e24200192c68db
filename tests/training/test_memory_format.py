"""Channels-last changes the order in memory and the rounding only."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from fedbn_flwr.training.batches import inputs_for, set_memory_format

LAST = {"memory_format": torch.channels_last}


def resnet() -> nn.Module:
    return resnet18(num_classes=2)


def is_last(model: nn.Module) -> bool:
    return all(p.is_contiguous(**LAST) for p in model.parameters() if p.dim() == 4)


def test_the_format_follows_the_model_and_not_the_clock() -> None:
    assert is_last(set_memory_format(resnet()))
    assert not is_last(set_memory_format(resnet().double())), "no faster in float64"
    for norm in (nn.GroupNorm(4, 4), nn.InstanceNorm2d(4), nn.GroupNorm(2, 4)):
        model = set_memory_format(nn.Sequential(nn.Conv2d(3, 4, 3), norm))
        is_fast = getattr(norm, "num_groups", 4) == 2
        assert is_last(model) == is_fast, "slower in torch"
    linear = nn.Linear(3, 2)
    assert set_memory_format(linear) is linear


class Net(nn.Module):
    """PyTorch's small tutorial network with a view that needs contiguous images."""

    def __init__(self, viewed: str = "always") -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, 4, 5), nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, 5)
        self.fc, self.viewed = nn.Linear(6 * 4 * 4, 2), viewed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv2(torch.relu(self.norm(self.conv1(x)))))
        torch.rand(())
        if self.viewed == "pooled":
            return self.fc(x.mean((2, 3), keepdim=True).view(-1, 6).repeat(1, 16))
        mode = "in training" if self.training else "in tests"
        here = self.viewed in ("always", mode)
        return self.fc(x.view(-1, 96) if here else x.flatten(1))

    def extra_repr(self) -> str:
        return self.viewed


VIEWS = ("always", "in training", "in tests")


def images() -> torch.Tensor:
    return torch.rand(2, 3, 12, 12)


@pytest.mark.parametrize("viewed", VIEWS)
def test_a_model_that_views_its_memory_stays_contiguous(viewed: str) -> None:
    model = set_memory_format(Net(viewed), images)
    assert all(p.is_contiguous() for p in model.parameters())


def test_a_model_whose_views_work_is_tried_once_and_without_a_trace() -> None:
    asked = []

    def example() -> torch.Tensor:
        asked.append(1)
        return images()

    torch.manual_seed(3)
    model = Net("pooled")
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert is_last(set_memory_format(model, example))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert is_last(set_memory_format(Net("pooled"), example)), (
        "an equal model of another client"
    )
    assert is_last(set_memory_format(resnet(), example)), "known"
    assert len(asked) == 1


def test_inputs_get_the_models_format() -> None:
    plain, last = inputs_for(resnet()), inputs_for(set_memory_format(resnet()))
    assert last(images()).is_contiguous(**LAST)
    assert plain(images()).is_contiguous()
    assert last(torch.rand(4, 3)).shape == (4, 3)


class Looked(nn.Module):
    """A model with a table of its own, and a layer in half precision."""

    def __init__(self, table: torch.Tensor, last: nn.Module) -> None:
        super().__init__()
        self.table = nn.Parameter(table, requires_grad=False)
        self.last = last


@pytest.mark.parametrize("shape", [(), (4,), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float64])
def test_inputs_get_the_dtype_of_the_first_layer(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """A parameter of the model itself may be a factor of the outputs."""
    table = torch.ones(shape, dtype=dtype)
    alone = dtype if dtype.is_floating_point else torch.float32
    for model, wanted in (
        (Looked(table, nn.Linear(4, 3).half()), torch.float16),
        (Looked(table, nn.ReLU()), alone),
        (nn.Linear(4, 2, dtype=torch.complex64), torch.complex64),
    ):
        assert inputs_for(model)(torch.rand(2, 4).double()).dtype == wanted
        assert inputs_for(model)(torch.arange(2)).dtype == torch.int64
