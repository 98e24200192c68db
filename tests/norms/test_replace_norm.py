"""The state, sharing, report and errors of replace_norm."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.norms import (
    NORMS,
    NormReport,
    Replacement,
    batchnorm_places,
    replace_norm,
)

# fixup: test_fixup.py
REPLACING = [kind for kind in NORMS if kind not in ("batch", "fixup")]
GROUPED = ["group", "layer", "instance"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Whitening(nn.BatchNorm2d):
    """A BatchNorm whose name does not show it."""


class Fused(nn.BatchNorm2d):
    def __init__(self, act: nn.Module) -> None:
        super().__init__(4)
        self.act = act


class Relu(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Scaled(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return 0.2 * super().forward(input)


class Leaky(nn.BatchNorm2d):
    """A BatchNorm with its slope as an attribute, like InPlaceABN."""

    slope = 0.01

    def forward(self, input: Tensor) -> Tensor:
        return functional.leaky_relu(super().forward(input), self.slope)


class Dropped(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return functional.dropout(super().forward(input), 0.5, self.training)


class Gated(nn.BatchNorm2d):
    """A BatchNorm with a trained gate that is still 1 and changes nothing."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.gate = nn.Parameter(torch.ones(1))

    def forward(self, input: Tensor) -> Tensor:
        return self.gate * super().forward(input)


class Conditional(nn.BatchNorm2d):
    def forward(self, input: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input) * scale


class ChannelsLast(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.movedim(3, 1)).movedim(1, 3)


def patched(channels: int) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(channels)
    plain = layer.forward
    layer.forward = lambda input: plain(input).relu()  # type: ignore[method-assign]
    return layer


def hooked(channels: int, before: bool = False) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(channels)
    if before:
        layer.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
    else:
        layer.register_forward_hook(lambda _, inputs, output: output.relu())
    return layer


class Called(nn.BatchNorm2d):
    """A BatchNorm that adds a ReLU in its call and not in its forward pass."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs).relu()


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
    )


def norm_rows(report: NormReport) -> list[Replacement]:
    """Return the rows of norm layers, without rows of convolutions."""
    return [row for row in report if not row.old.startswith("Conv")]


@pytest.mark.parametrize("kind", ["batch", *REPLACING])
def test_the_given_model_and_all_other_state_do_not_change(kind: str) -> None:
    model = small()
    before = copy.deepcopy(model.state_dict())
    new, _ = replace_norm(model, kind)
    with torch.no_grad():
        for tensor in new.state_dict().values():
            tensor.zero_()
    assert all(
        torch.equal(before[name], value) for name, value in model.state_dict().items()
    )
    assert type(new) is type(model)
    assert isinstance(new.get_submodule("0"), nn.Conv2d)
    assert type(new.get_submodule("2")) is nn.ReLU


@pytest.mark.parametrize("kind", GROUPED)
def test_gamma_beta_eps_dtype_mode_and_requires_grad_are_kept(kind: str) -> None:
    old = nn.BatchNorm2d(4, eps=0.25, dtype=torch.bfloat16)
    nn.init.normal_(old.weight)
    nn.init.normal_(old.bias)
    old.weight.requires_grad_(False)
    model = nn.Sequential(nn.Conv2d(4, 4, 1, dtype=torch.bfloat16), old)
    model.train()
    old.eval()
    new, report = replace_norm(model, kind)
    layer = new.get_submodule("1")
    assert isinstance(layer, nn.GroupNorm)
    assert torch.equal(layer.weight, old.weight)
    assert torch.equal(layer.bias, old.bias)
    assert layer.weight.data_ptr() != old.weight.data_ptr()
    assert (layer.weight.dtype, layer.eps, layer.affine) == (torch.bfloat16, 0.25, True)
    assert (layer.weight.requires_grad, layer.bias.requires_grad) == (False, True)
    assert not layer.training
    assert new.training
    assert new.get_submodule("0").training
    assert layer.num_groups == {"group": 2, "layer": 1, "instance": 4}[kind]
    assert set(layer.state_dict()) == {"weight", "bias"}
    assert report.replaced[0].old == "BatchNorm2d(4, eps=0.25)"


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
def test_device_is_kept(kind: str) -> None:
    new, _ = replace_norm(nn.BatchNorm1d(4, device="meta"), kind)
    assert new.weight.device.type == new.bias.device.type == "meta"


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("tracked", [True, False])
def test_without_affine_there_are_no_parameters(kind: str, tracked: bool) -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(4, affine=False, track_running_stats=tracked), nn.BatchNorm2d(4)
    )
    new, report = replace_norm(model, kind)
    assert not new.get_submodule("0").affine
    assert not new.get_submodule("0").state_dict()
    assert len(report) == 2
    assert ("track_running_stats=False" in report.replaced[0].old) is not tracked
    assert new(torch.randn(2, 4, 3, 3)).shape == (2, 4, 3, 3)


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, Whitening],
)
def test_every_type_and_a_model_that_is_the_layer(layer: type[nn.BatchNorm2d]) -> None:
    new, report = replace_norm(layer(4), "group")
    assert isinstance(new, nn.GroupNorm)
    assert report.replaced == (
        Replacement("", f"{layer.__name__}(4)", "CheckedGroupNorm(2, 4)"),
    )
    assert "(the model itself)" in str(report)


@pytest.mark.parametrize("kind", REPLACING)
def test_a_shared_layer_stays_one_shared_layer(kind: str) -> None:
    new, report = replace_norm(Twice(), kind)
    assert isinstance(new, Twice)
    assert new.first is new.alias
    assert new.first[1] is new.again
    assert [row.path for row in norm_rows(report)] == ["first.1", "alias.1", "again"]
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
    assert new.get_parameter("0.weight") is new.get_parameter("1.weight")
    assert new.get_parameter("0.bias") is not new.get_parameter("1.bias")
    assert new.get_parameter("2.weight") is new.get_parameter("3.weight")


def test_other_norm_layers_are_not_replaced() -> None:
    model = nn.Sequential(
        nn.InstanceNorm2d(4, track_running_stats=True),
        nn.GroupNorm(2, 4),
        nn.LayerNorm(3),
    )
    new, report = replace_norm(model, "none")
    assert [type(m) for m in new.children()] == [
        nn.InstanceNorm2d,
        nn.GroupNorm,
        nn.LayerNorm,
    ]
    assert not report
    assert list(report) == []
    assert str(report) == "norm 'none': no layer replaced"


def test_indivisible_channels_name_every_layer() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(6), nn.BatchNorm2d(8), nn.Sequential(nn.BatchNorm2d(10))
    )
    with pytest.raises(
        NormLayerError,
        match=(
            r"by 4 in 0 \(6 channels\), 2.0 \(10 channels\)\. .* fit every layer:"
            r" 1, 2\."
        ),
    ):
        replace_norm(model, "group", groups=4)


@pytest.mark.parametrize("groups", [0, -2, 2.0, True, "2"])
def test_groups_must_be_a_positive_whole_number(groups: object) -> None:
    with pytest.raises(ConfigError, match="groups is"):
        replace_norm(nn.BatchNorm2d(4), "group", groups=groups)


def test_unknown_kind_and_option() -> None:
    with pytest.raises(KeyError):
        replace_norm(small(), "groups")
    with pytest.raises(TypeError):
        replace_norm(small(), "group", group=2)
    with pytest.raises(TypeError):
        replace_norm(small(), "layer", groups=2)


@pytest.mark.parametrize("kind", NORMS)
def test_lazy_layers_that_saw_no_batch_are_refused_by_name(kind: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.LazyBatchNorm2d()))
    with pytest.raises(
        NormLayerError, match=r"1\.0 \(LazyBatchNorm2d\).*Run one batch"
    ):
        replace_norm(model, kind)
    model(torch.randn(2, 3, 2, 2))
    if kind != "fixup":
        assert len(norm_rows(replace_norm(model, kind)[1])) == (kind != "batch")


@pytest.mark.parametrize("kind", ["group", "none"])
@pytest.mark.parametrize(
    "make",
    [
        *(
            Relu,
            Scaled,
            Leaky,
            Dropped,
            Gated,
            Conditional,
            ChannelsLast,
            patched,
            Called,
            hooked,
        ),
        lambda c: hooked(c, before=True),
        lambda c: weight_norm(nn.BatchNorm2d(c), dim=None),
        lambda c: Fused(nn.ReLU()),
    ],
)
@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_what_a_batchnorm_does_beside_normalising_is_not_lost(
    make, kind: str, gamma: float
) -> None:
    """The cases include a gamma of zero at the end of a residual branch.

    The output then reveals nothing.
    """
    layer = make(4)
    with torch.no_grad():
        layer.bias.zero_()
        if gamma == 0.0:
            layer.weight.zero_()
    with pytest.raises(NormLayerError, match=r"normalising .*: 1\.0 \("):
        replace_norm(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(layer)), kind)


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
