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
        self.conv = nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.wide = nn.Conv2d(4, 8, 1)
        self.narrow = nn.BatchNorm2d(4)

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
    found = {}
    for key, norms in wiring(model).norms_after.items():
        found[paths[key]] = [paths[id(norm)] for norm in norms]
    return found


def test_the_forward_pass_counts_not_the_order_of_registration() -> None:
    assert after(Net()) == after(AnyInputs()) == {"conv": ["norm"], "other": []}
    assert after(Crossed()) == {"conv": ["late"], "other": ["norm"]}


def test_an_output_used_elsewhere_too_is_not_followed_by_a_norm() -> None:
    model = Skips()
    assert after(model) == {"conv": [], "other": ["late"]}
    assert wiring(model).added == {id(model.norm)}


def test_sizes_and_identities_do_not_count() -> None:
    assert after(Asks()) == {"conv": ["norm"], "other": ["late"]}


def test_if_values_decide_children_are_traced_and_neighbours_count() -> None:
    assert after(Branches()) == {
        "inner.conv": ["inner.norm"],
        "inner.other": [],
        "conv": ["norm"],
    }


def test_every_use_of_a_convolution_counts() -> None:
    found = {"conv": [], "other": ["late"]}
    assert after(Repeats()) == after(RepeatsBackwards()) == found


@pytest.mark.parametrize("kind", ["group+ws", "wsconv"])
def test_replace_norm_uses_the_wiring(kind: str) -> None:
    new, report = replace_norm(Net(), kind)
    assert (
        "conv" in [row.path for row in report.replaced],
        "other" in [row.path for row in report.replaced],
    ) == (True, kind == "wsconv")
    assert new(torch.zeros(2, 4, 3, 3)).shape == (2, 4, 3, 3)
