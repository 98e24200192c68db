"""The state, sharing, report and errors of replace_norm."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.norms import (
    NORMS,
    Replacement,
    batchnorm_places,
    replace_norm,
)

# fixup: test_fixup.py
REPLACING = [kind for kind in NORMS if kind not in ("batch", "fixup")]
GROUPED = ["group", "layer", "instance"]


class Whitening(nn.BatchNorm2d):
    """A BatchNorm whose name does not show it."""


class Twice(nn.Module):
    """One BatchNorm object under two names of one parent and inside a shared block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.alias = self.first
        self.again = self.first[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.again(self.alias(self.first(x)))
        return y


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        Whitening(4),
        nn.ReLU(),
        nn.Sequential(nn.BatchNorm2d(4)),
        nn.InstanceNorm2d(4, track_running_stats=True),
    )


@pytest.mark.parametrize("kind", ["batch", *REPLACING])
def test_the_given_model_and_all_other_state_do_not_change(kind: str) -> None:
    model = small()
    before = copy.deepcopy(model.state_dict())
    new, _ = replace_norm(model, kind)
    built, _ = replace_norm(lambda: copy.deepcopy(model), kind)
    assert str(built.state_dict()) == str(new.state_dict())
    with torch.no_grad():
        for tensor in new.state_dict().values():
            tensor.zero_()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert type(new) is type(model)
    assert isinstance(new[0], nn.Conv2d)
    assert type(new[2]) is nn.ReLU
    assert type(new[4]) is nn.InstanceNorm2d


@pytest.mark.parametrize("kind", GROUPED)
def test_gamma_beta_eps_dtype_mode_and_requires_grad_are_kept(kind: str) -> None:
    old = nn.BatchNorm2d(4, eps=0.25, dtype=torch.bfloat16)
    nn.init.normal_(old.weight.requires_grad_(False))
    nn.init.normal_(old.bias)
    model = nn.Sequential(nn.Conv2d(4, 4, 1, dtype=torch.bfloat16), old)
    old.eval()
    new, report = replace_norm(model, kind)
    layer = new[1]
    assert isinstance(layer, nn.GroupNorm)
    for name, entry in layer.state_dict().items():
        assert torch.equal(entry, old.state_dict()[name])
        assert entry.data_ptr() != old.state_dict()[name].data_ptr()
    assert (layer.weight.dtype, layer.eps, layer.affine) == (torch.bfloat16, 0.25, True)
    assert (layer.weight.requires_grad, layer.bias.requires_grad) == (False, True)
    assert [one.training for one in (new, new[0], layer)] == [True, True, False]
    assert layer.num_groups == {"group": 2, "layer": 1, "instance": 4}[kind]
    assert set(layer.state_dict()) == {"weight", "bias"}
    assert report.replaced[0].old.startswith("BatchNorm2d(4, eps=0.25,")


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in REPLACING), ("wsconv", {"gain": True})],
)
def test_of_a_frozen_network_nothing_learns(
    kind: str, options: dict[str, bool]
) -> None:
    """This includes a bias or a gain that a norm adds to other layers."""
    new, _ = replace_norm(small().requires_grad_(False), kind, **options)
    learns = [name for name, p in new.named_parameters() if p.requires_grad]
    assert learns == []


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("tracked", [True, False])
def test_without_affine_there_are_no_parameters(kind: str, tracked: bool) -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(4, affine=False, track_running_stats=tracked), nn.BatchNorm2d(4)
    )
    new, report = replace_norm(model, kind)
    assert not new[0].affine
    assert not new[0].state_dict()
    assert len(report.replaced) == 2
    assert ("track_running_stats=False" in report.replaced[0].old) is not tracked
    assert new(torch.randn(2, 4, 3, 3)).shape == (2, 4, 3, 3)


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, Whitening],
)
def test_every_type_and_a_model_that_is_the_layer(layer: type[nn.BatchNorm2d]) -> None:
    new, report = replace_norm(layer(4), "group")
    assert isinstance(new, nn.GroupNorm)
    before = f"{layer.__name__}({layer(4).extra_repr()})"
    after = f"CheckedGroupNorm({new.extra_repr()})"
    assert report.replaced == (Replacement("", before, after),)
    assert "(the model itself)" in str(report)


@pytest.mark.parametrize("kind", REPLACING)
def test_a_shared_layer_stays_one_shared_layer(kind: str) -> None:
    new, report = replace_norm(Twice(), kind)
    assert isinstance(new, Twice)
    assert new.first is new.alias
    assert new.first[1] is new.again
    norms = [row.path for row in report.replaced if not row.old.startswith("Conv")]
    assert norms == ["first.1", "alias.1", "again"]
    assert new.first[0] is new.alias[0]
    assert not batchnorm_places(new)
    assert new(torch.randn(2, 4, 3, 3)).shape == (2, 4, 3, 3)


def test_tied_parameters_stay_tied() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
    )
    model[1].weight = model[0].weight
    model[3].weight = model[2].weight
    new, _ = replace_norm(model, "layer")
    assert new[0].weight is new[1].weight
    assert new[0].bias is not new[1].bias
    assert new[2].weight is new[3].weight


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 1), (1, 4), (3, 4, 1, 1)])
@pytest.mark.parametrize("training", [True, False])
def test_groups_of_one_value_raise_with_the_path(
    shape: tuple[int, ...], training: bool
) -> None:
    inner = nn.BatchNorm2d(4) if len(shape) == 4 else nn.BatchNorm1d(4)
    model, _ = replace_norm(
        nn.Sequential(nn.Sequential(inner)).train(training), "instance"
    )
    with pytest.raises(
        NormLayerError,
        match=r"at 0\.0: an input of shape .* in 4 groups has one value per group",
    ):
        model(torch.randn(shape))
