"""Norms after convolutions that are traced, branching, shared or unreached."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.norms import replace_norm
from fedbn_flwr.norms.wiring import wiring


class Net(nn.Module):
    """A convolution and a norm that are registered in the wrong order."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.late = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 1)
        self.other = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.late(torch.relu(self.other(self.norm(self.conv(x)))))


class Skips(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.late(self.other(self.norm(y) + y))


class Asks(Net):
    """A network whose sizes and Identity do not use the values of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z = self.norm(self.nothing(y)).view(y.size(0), y.shape[1], -1, y.shape[3])
        return self.late(self.other(z))


class Branches(nn.Module):
    """A forward pass that depends on values, so only its children are traced."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.wide, self.narrow = nn.Conv2d(4, 8, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(self.inner(x)))
        return x if float(x.sum()) > 0 else -x


class Repeats(Net):
    """The same convolution before a norm, then before another layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.late(self.other(self.conv(self.norm(self.conv(x)))))


class RepeatsBackwards(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(self.late(self.other(self.conv(x)))))


class AnyInputs(Net):
    def forward(self, *inputs: Tensor) -> Tensor:
        return super().forward(*inputs)


class Crossed(nn.Module):
    """Each norm is registered behind the convolution that it does not follow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.other, self.late = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.other(self.late(self.conv(x))))


def after(model: nn.Module) -> dict[str, list[str]]:
    paths = {id(module): path for path, module in model.named_modules()}
    return {
        paths[key]: [paths[id(norm)] for norm in norms]
        for key, norms in wiring(model).norms_after.items()
    }


FIRST, LAST = {"conv": ["norm"], "other": []}, {"conv": [], "other": ["late"]}
CASES = {
    "the order of registration does not count": (Net, FIRST),
    "inputs without names": (AnyInputs, FIRST),
    "each norm is behind the other convolution": (
        Crossed,
        {"conv": ["late"], "other": ["norm"]},
    ),
    "an output that is used elsewhere too": (Skips, LAST),
    "sizes and an Identity": (Asks, {"conv": ["norm"], "other": ["late"]}),
    "values decide: children are traced, and neighbours count": (
        Branches,
        {"inner.conv": ["inner.norm"], "inner.other": [], "conv": ["norm"]},
    ),
    "a second use before another layer": (Repeats, LAST),
    "a first use before another layer": (RepeatsBackwards, LAST),
}


@pytest.mark.parametrize("case", CASES)
def test_a_norm_follows_a_convolution_in_the_forward_pass(case: str) -> None:
    make, found = CASES[case]
    assert after(make()) == found


def test_the_norm_that_is_added_to_its_input_is_known() -> None:
    model = Skips()
    assert wiring(model).added == {id(model.norm)}


@pytest.mark.parametrize("kind", ["group+ws", "wsconv"])
def test_replace_norm_uses_the_wiring(kind: str) -> None:
    new, report = replace_norm(Net(), kind)
    paths = [row.path for row in report.replaced]
    assert "conv" in paths
    assert ("other" in paths) == (kind == "wsconv")
    assert new(torch.zeros(2, 4, 3, 3)).shape == (2, 4, 3, 3)
