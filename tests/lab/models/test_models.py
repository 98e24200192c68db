"""The models have sizes, seeds, shapes, and every kind of norm."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.lab.models import MODELS, build_model, input_shape, model_info
from fedbn_flwr.lab.models.mlp import MLP
from fedbn_flwr.lab.models.resnet import BasicBlock, SmallResNet
from fedbn_flwr.norms import NORMS
from tests.support.fast import fast

SMALLEST = ("mlp", "lenet", "resnet20")
NAMES = [*SMALLEST, "torchvision:resnet18", "torchvision:googlenet"]
RESIDUAL = ("resnet20", "torchvision:resnet18")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def floats(model: nn.Module, leaves: tuple[str, ...] = ("",)) -> int:
    """Return the number of floats in the state dict.

    Only names with these endings count; by default all.
    """
    state = model.state_dict().items()
    return sum(
        value.numel()
        for name, value in state
        if value.is_floating_point() and name.endswith(leaves)
    )


def build(name: str, **changes: object) -> nn.Module:
    return build_model(
        name, **{"num_classes": 10, "channels": 3, "size": 32, **changes}
    )


@pytest.mark.parametrize(
    ("name", "channels", "size", "entries", "statistics"),
    [
        ("resnet20", 3, 32, 271_098, 1_376),  # FedTAN's Table 3
        ("mlp", 1, 28, 23_980, 60),  # FedTAN's Table 5
        ("lenet", 1, 28, 44_470 + 44, 44),  # LeNet-5 and 2 x 22 of gamma and beta
        ("lenet", 3, 32, 62_050 + 44, 44),
    ],
)
def test_models_have_the_floats_of_the_papers(
    name: str, channels: int, size: int, entries: int, statistics: int
) -> None:
    model = build(name, channels=channels, size=size)
    assert floats(model) == entries
    assert floats(model, ("running_mean", "running_var")) == statistics


OWN = [name for name in MODELS if ":" not in name and name != "signal-cnn"]


@pytest.mark.parametrize("name", OWN)
def test_each_model_of_the_package_names_its_head(name: str) -> None:
    with torch.device("meta"):
        model = model_info(name).build(10, *input_shape(name, 3, 32))
    assert split_state(model, personal="last-layer").personal


GRID = [*itertools.product(NAMES, NORMS)]
# Every other norm on the smallest models, and BatchNorm on a third of all models.
QUICK = [case for case in GRID if case[0] in SMALLEST and case[1] != "batch"]
QUICK += [case for case in GRID if case[1] == "batch"][::3]


@pytest.mark.parametrize(("name", "norm"), fast(GRID, *QUICK))
def test_every_norm_on_every_model_gives_plain_logits(name: str, norm: str) -> None:
    if norm == "fixup" and name not in RESIDUAL:
        with pytest.raises(
            NormLayerError, match="norm 'fixup' is only for residual networks"
        ):
            build(name, norm=norm)
        return
    model = build(name, num_classes=7, norm=norm)
    assert model.training
    channels, side = input_shape(name, 3, 32)
    x = torch.randn(2, channels, side, side)
    if norm == "instance" and name == "mlp":
        with pytest.raises(NormLayerError, match="the norm layer at norm:"):
            model(x)
        return
    for training in (True, False):
        logits = model.train(training)(x)
        assert type(logits) is torch.Tensor
        assert logits.shape == (2, 7)
        assert bool(torch.isfinite(logits).all())
    logits.sum().backward()
    # A bias before BatchNorm has gradient 0 instead of None, and every other parameter
    # has a gradient.
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "native", "wanted"),
    [
        ("lenet", (1, 8), (1, 28)),
        ("lenet", (3, 32), (3, 32)),
        ("resnet20", (1, 28), (1, 32)),
        ("torchvision:resnet18", (1, 28), (3, 64)),
        ("torchvision:inception_v3", (3, 32), (3, 75)),
        ("torchvision:vit_b_16", (3, 256), (3, 224)),
    ],
)
def test_input_shape_and_a_forward_pass_at_it(
    name: str, native: tuple[int, int], wanted: tuple[int, int]
) -> None:
    channels, side = input_shape(name, *native)
    assert (channels, side) == wanted == input_shape(name, *wanted)
    with torch.device("meta"):
        logits = model_info(name).build(10, channels, side)(
            torch.empty(2, channels, side, side)
        )
    assert logits.shape == (2, 10)


def test_shortcut_is_option_a() -> None:
    block = build("resnet20").get_submodule("layer2.0")
    assert isinstance(block, BasicBlock)
    x = torch.randn(2, 16, 6, 6)
    out = block.shortcut(x)
    assert torch.equal(out, F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 8, 8)))
    layers = [name for name, _ in block.named_parameters()]
    assert {name[:4] for name in layers} == {"conv", "norm"}


IMAGES = (3, 32, 32)


@pytest.mark.parametrize(
    ("name", "shape", "named"),
    [
        ("resnet-20", IMAGES, "'resnet20'"),
        ("resnet50", IMAGES, "'torchvision:resnet50'"),
        ("torchvision:resnet81", IMAGES, "'resnet18'"),
        ("torchvision:<name>", IMAGES, "Allowed"),
        ("torchvision:fasterrcnn_resnet50_fpn", IMAGES, "Allowed"),
        ("lenet", (0, 32, 32), "does not take examples of shape"),
        ("lenet", (3, -1, -1), "does not take examples of shape"),
        ("lenet", (13,), r"\(13,\).*Use mlp"),
        ("mlp", (2, 40), r"\(2, 40\).*Use your own model"),
        ("lenet", (2, 3, 4, 5), "own model"),
        ("lenet", (2, 3, 4, 5, 6), "own model"),
    ],
)
def test_a_model_that_is_unknown_or_does_not_fit_is_refused_and_others_are_named(
    name: str, shape: tuple[int, ...], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        build_model(name, num_classes=2, input_shape=shape)


def test_norm_groups_reach_the_layers_and_wrong_numbers_are_named() -> None:
    assert build("resnet20", norm="group", norm_groups=8).norm.num_groups == 8  # type: ignore[union-attr]
    with pytest.raises(NormLayerError, match=r"norm1 \(6 channels\)"):
        build("lenet", norm="group", norm_groups=4)


def test_mlp_takes_rows() -> None:
    model = build_model("mlp", num_classes=1, input_shape=(13,), norm="group")
    assert model(torch.randn(4, 13)).shape == (4, 1)
    wide = MLP(2, 13, hidden=(64, 32))
    shapes = [tuple(m.weight.shape) for m in wide.modules() if isinstance(m, nn.Linear)]
    assert shapes == [(64, 13), (32, 64), (2, 32)]


def test_the_small_residual_networks_begin_as_in_the_papers_code() -> None:
    """Every weight, even in the last layer, is He-normal with variance 2 / fan-in."""
    torch.manual_seed(0)
    for layer in SmallResNet(20, 10, 3).modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            fan_in = layer.weight[0].numel()
            spread = float(layer.weight.square().mean() * fan_in / 2)
            assert 0.75 < spread < 1.3, layer
            assert layer.weight.abs().max() > 2.5 * (2 / fan_in) ** 0.5, "is uniform"
