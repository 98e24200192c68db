"""Scaled weight standardisation against its formula and timm's layer, in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy.integrate import quad
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.norms import batchnorm_places, replace_norm
from fedbn_flwr.norms.wsconv import GAMMAS
from tests.support.formulas import equals_formula


def reference(weight: Tensor, gain: Tensor, gamma: float) -> Tensor:
    """Return the filters, computed one by one with sums."""
    filters = []
    for one, factor in zip(weight, gain.flatten(), strict=True):
        n = one.numel()
        mean = one.sum() / n
        var = ((one - mean) ** 2).sum() / n
        filters.append(
            factor * gamma * (one - mean) / ((var + 1e-6).sqrt() * math.sqrt(n))
        )
    return torch.stack(filters)


@pytest.mark.parametrize("activation", ["relu", "identity", "silu"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("gain", [True, False])
def test_forward_and_backward_equal_the_formula(
    activation: str, groups: int, gain: bool
) -> None:
    conv = nn.Conv2d(
        4, 8, 3, stride=2, padding=1, groups=groups, padding_mode="reflect"
    ).double()
    new, _ = replace_norm(conv, "wsconv", activation=activation, gain=gain)
    assert sorted(new.state_dict()) == sorted(["weight", "bias"] + ["gain"] * gain)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    parameters = dict(conv.named_parameters())
    if gain:
        assert torch.equal(new.gain, torch.ones(8, 1, 1, 1, dtype=torch.float64))
        parameters["gain"] = nn.init.normal_(new.gain)

    def formula(own: dict[str, Tensor]) -> Tensor:
        gains = own.get("gain", torch.ones(8).double())
        weight = reference(own["weight"], gains, GAMMAS[activation])
        return conv._conv_forward(x, weight, own["bias"])

    equals_formula(new, x, formula, parameters.items())


ACTIVATIONS = {name: getattr(F, name) for name in GAMMAS if hasattr(F, name)} | {
    "identity": lambda x: x
}


@pytest.mark.parametrize("activation", GAMMAS)
def test_gamma_makes_the_variance_of_the_activation_one(activation: str) -> None:
    def moment(z: float, power: int) -> float:
        value = float(ACTIVATIONS[activation](torch.tensor(z, dtype=torch.float64)))
        return value**power * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

    # Integrate piece by piece because some functions have kinks at these edges.
    edges = [-9, -3, 0, 3, 6, 9]
    mean, square = (
        sum(
            quad(moment, a, b, args=(power,), epsabs=1e-9)[0]
            for a, b in itertools.pairwise(edges)
        )
        for power in (1, 2)
    )
    assert GAMMAS[activation] == pytest.approx((square - mean**2) ** -0.5, rel=1e-7)


def test_every_convolution_and_norm_and_the_new_biases() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1, bias=False),  # the norm behind it gives it a bias
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 1, bias=False),  # no norm, so no bias
        nn.ReLU(),
        nn.Conv2d(4, 4, 1),  # its own bias is kept
        nn.BatchNorm2d(4),
        # The norm has no beta, so the layer has no bias.
        nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False),
        nn.BatchNorm2d(4, affine=False),
        nn.Flatten(),
        nn.Linear(16, 6, bias=False),
        nn.BatchNorm1d(6),
        nn.Linear(6, 6, bias=False),
    )
    new, report = replace_norm(model, "wsconv")
    changed = [0, 1, 2, 4, 5, 6, 7, 9, 10]
    assert [row.path for row in report.replaced] == [*map(str, changed)]
    assert not batchnorm_places(new)
    assert [new[k].bias is not None for k in (0, 2, 4, 6)] == [True, False, True, False]
    assert not new[0].bias.any()
    assert torch.equal(new[4].bias, model[4].bias)
    assert type(new[9]) is nn.Linear
    assert torch.equal(new[9].weight, model[9].weight)
    assert new[9].bias.tolist() == [0] * 6
    assert new[11].bias is None
    assert new(torch.randn(1, 3, 2, 2)).shape == (1, 6)


@pytest.mark.parametrize("value", [0.0, 0.3, 1e-20])
def test_filters_of_equal_weights_are_zero_never_nan(value: float) -> None:
    conv = nn.Conv2d(2, 3, 3)
    nn.init.constant_(conv.weight, value)
    new, _ = replace_norm(conv, "wsconv")
    filters = new.derived_weight()
    assert float(filters.detach().abs().max()) < 1e-4
    filters.square().sum().backward()
    assert torch.isfinite(new.weight.grad).all()


@pytest.mark.parametrize(
    "layer",
    [nn.ConvTranspose2d(4, 6, 2, bias=False), nn.Conv2d(4, 4, 1, groups=4, bias=False)],
    ids=str,
)
def test_they_too_get_the_bias_that_batchnorm_supplied(layer: nn.Conv2d) -> None:
    """At a shift of zero, the network is unchanged.

    The bias learns if the weight learns.
    """
    layer.weight.requires_grad_(False)
    new, report = replace_norm(
        nn.Sequential(layer, nn.BatchNorm2d(layer.out_channels)).double(), "wsconv"
    )
    assert [row.path for row in report.replaced] == ["0", "1"]
    changed = new[0]
    assert torch.equal(changed.bias, torch.zeros(layer.out_channels).double())
    assert not changed.bias.requires_grad
    assert torch.equal(changed.weight, layer.weight.double())
    assert type(changed) is type(layer), "its filters are not standardised"


class InGroups(nn.Module):
    """A network whose BatchNorm shares four betas among eight outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 8, bias=False), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.linear(x).reshape(-1, 4))
        return out


def test_a_beta_of_another_width_becomes_no_bias() -> None:
    assert replace_norm(InGroups(), "wsconv")[0].linear.bias is None


def test_an_unknown_activation_is_refused_before_the_model_changes() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    with pytest.raises(ConfigError, match=r"activation 'sillu'.*'silu'"):
        replace_norm(model, "wsconv", activation="sillu", in_place=True)
    assert type(model[1]) is nn.BatchNorm2d
