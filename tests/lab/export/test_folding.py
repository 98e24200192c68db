"""Folding changes no output, and folds nothing that is used elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrizations

from fedbn_flwr.lab.export import fold
from fedbn_flwr.lab.models import build_model
from fedbn_flwr.norms import replace_norm


def trained(model: nn.Module, example: Tensor) -> nn.Module:
    """Give the model statistics, gamma and beta other than the initial values."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.affine:
            for parameter in (module.weight, module.bias):
                parameter.data.copy_(
                    torch.rand(parameter.shape, generator=generator) + 0.5
                )
    with torch.no_grad():
        for factor in (1, 3):
            model.train()(factor * example + 1)
    return model.eval()


def check(model: nn.Module, example: Tensor, folded: int, left: str = "") -> nn.Module:
    """Check the number of folded layers and the outputs, and return the model.

    ``left`` is the reason for the first layer that is not folded.
    """
    trained(model, example)
    before = copy.deepcopy(model.state_dict())
    new, report = fold(model, example)
    assert len(report.folded) == folded, report
    reasons = list(report.left.values())
    assert left in (reasons[0] if reasons else ""), report
    assert bool(left) == bool(reasons), report
    with torch.no_grad():
        torch.testing.assert_close(new(example), model(example), rtol=1e-9, atol=1e-9)
    layers = dict(model.named_modules())
    stays = [path for path in report.left if isinstance(layers[path], _BatchNorm)]
    assert [
        path for path, layer in new.named_modules() if isinstance(layer, _BatchNorm)
    ] == stays
    for name, entry in model.state_dict().items():
        assert torch.equal(entry, before[name]), "the model itself changed"
    return new


def images(channels: int = 3) -> Tensor:
    return torch.randn(
        4,
        channels,
        8,
        8,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(1),
    )


def net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.Conv2d(
            3, 6, 3, stride=2, dilation=2, padding=2, groups=3, padding_mode="reflect"
        ),
        nn.ConvTranspose2d(3, 4, 2, stride=2),
    ],
    ids=["conv", "groups, reflect", "transposed"],
)
@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d, lambda n: nn.BatchNorm2d(n, affine=False)],
    ids=["", "no affine"],
)
def test_convolutions(layer: nn.Conv2d, norm: Callable[[int], nn.Module]) -> None:
    new = check(net(layer, norm(layer.out_channels), nn.ReLU()), images(), 1)
    assert type(new[0]) is type(layer)
    assert isinstance(new[1], nn.Identity)


def test_linear_and_other_dimensions() -> None:
    points = images().flatten(1)
    check(
        net(
            nn.Linear(192, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)
        ),
        points,
        1,
    )
    check(net(nn.Linear(192, 4), nn.BatchNorm1d(4, affine=False)), points, 1)
    check(net(nn.Flatten(2), nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)), images(), 1)
    check(
        net(nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2)), images(), 1
    )
    # The linear layer has its features in the last dimension, but BatchNorm has its
    # channels in the second.
    check(
        net(nn.Flatten(2), nn.Linear(64, 3), nn.BatchNorm1d(3)),
        images(),
        0,
        "would change the outputs",
    )


def test_batch_renorm_and_derived_weights() -> None:
    plain = net(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
    )
    check(replace_norm(plain, "batch-renorm")[0], images(), 2)
    for norm, left in (("wsconv", ""), ("group+ws", "statistics from each example")):
        new = check(replace_norm(plain, norm)[0], images(), 0, left)
        assert {
            type(m) for m in new.modules() if isinstance(m, nn.modules.conv._ConvNd)
        } == {nn.Conv2d}
        assert "0.gain" not in new.state_dict()
    # Derived filters may precede BatchNorm in a user's model.
    for norm in ("wsconv", "group+ws"):
        derived = replace_norm(copy.deepcopy(plain), norm)[0]
        new = check(
            net(
                derived[0], nn.BatchNorm2d(4), nn.ReLU(), derived[3], nn.BatchNorm2d(4)
            ),
            images(),
            2,
        )
        assert type(new[0]) is type(new[3]) is nn.Conv2d


class Two(nn.Module):
    """Two convolutions and one or two norm layers, joined by ``how``."""

    def __init__(self, how: Callable[[Two, Tensor], Tensor]) -> None:
        super().__init__()
        self.how = how
        self.conv, self.other = (
            nn.Conv2d(3, 3, 3, padding=1),
            nn.Conv2d(3, 3, 3, padding=1),
        )
        self.norm, self.last = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def add_after(net: Two, x: Tensor) -> Tensor:
    y = net.conv(x)
    return net.norm(y) + y


@pytest.mark.parametrize(
    ("how", "folded", "left"),
    [
        (
            lambda n, x: n.norm(n.conv(x)) + n.norm(n.other(x)),
            0,
            "not the output of one",
        ),
        (
            lambda n, x: n.norm(n.conv(x)) + n.last(n.conv(x)),
            0,
            "would change the outputs",
        ),
        (add_after, 0, "would change the outputs"),
        (
            lambda n, x: n.conv(F.relu(n.norm(x))) + n.last(n.other(x)),
            1,
            "not the output of one",
        ),
        (lambda n, x: n.norm(torch.relu_(n.conv(x))), 0, "would change the outputs"),
        (
            lambda n, x: n.norm(n.conv(x)) + F.conv2d(x, n.conv.weight, padding=1),
            0,
            "would change the outputs",
        ),
        (
            lambda n, x: n.norm(n.conv(x)) + n.norm.running_mean.sum(),
            0,
            "would change the outputs",
        ),
        (lambda n, x: n.norm(n.conv(x)) * n.norm.eps, 0, "would change the outputs"),
        (
            lambda n, x: n.norm(torch.cat([n.conv(x), n.other(x)])),
            0,
            "not the output of one",
        ),
        # The same two layers in a row, twice: one folded layer replaces both.
        (lambda n, x: n.norm(n.conv(n.norm(n.conv(x)))), 1, "does not call"),
    ],
    ids=[
        "norm twice",
        "conv twice",
        "sum",
        "pre-activation",
        "in place",
        "tied weight",
        "statistics",
        "eps",
        "cat",
        "pair twice",
    ],
)
def test_what_is_used_elsewhere_stays(
    how: Callable[[Two, Tensor], Tensor], folded: int, left: str
) -> None:
    model = Two(how).double()
    called = set()
    for name in ("norm", "last"):
        getattr(model, name).register_forward_hook(
            lambda m, a, o, name=name: called.add(name)
        )
    model(images())
    for module in model.modules():
        module._forward_hooks.clear()
    if "last" not in called and "does not call" not in left:
        del model.last
    check(model, images(), folded, left)


def test_layers_with_a_forward_of_their_own_stay() -> None:
    class Fused(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(super().forward(x))

    check(net(nn.Conv2d(3, 4, 3), Fused(4)), images(), 0, "would change the outputs")
    conv = parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    check(net(conv, nn.BatchNorm2d(4)), images(), 0, "not the output of one")
    check(
        net(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)),
        images(),
        0,
        "no running statistics",
    )


def test_layers_in_a_plain_list_stay() -> None:
    class Listed(Two):
        def __init__(self) -> None:
            super().__init__(lambda net, x: net.steps[1](net.steps[0](x)))
            self.steps = [self.conv, self.norm]
            del self.other, self.last

    check(Listed().double(), images(), 0, "would change the outputs")


def test_a_layer_at_two_paths_is_folded_at_both() -> None:
    conv, norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
    new = check(net(conv, norm, nn.ReLU(), conv, norm), images(), 1)
    assert new[0] is new[3]


def test_the_report_names_what_stays() -> None:
    _, report = fold(
        net(
            nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        ),
        images(),
    )
    assert report.lines() == [
        "1 of the BatchNorm layers folded",
        (
            "1 not folded (0): its input is not the output of one convolution or linear"
            " layer"
        ),
        "1 not folded (3): GroupNorm computes its statistics from each example",
    ]
    assert fold(net(nn.ReLU()), images())[1].lines() == [
        "nothing to fold: the model has no norm layer"
    ]


def test_a_small_change_of_the_outputs_is_seen() -> None:
    """Infinite outputs that stay infinite do not count as a change."""
    check(
        Two(lambda n, x: n.norm(n.conv(x)) + getattr(n.norm, "eps", 0.0)).double(),
        images(),
        0,
        "would change the outputs",
    )
    model = trained(net(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), images())
    model[1].bias.data[0] = torch.inf
    assert fold(model, images())[1].folded


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_tf32_is_off_while_outputs_are_compared(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TF32, convolutions on a GPU round their operands to ten bits."""
    whole, of_conv = nn.Conv2d._conv_forward, torch.backends.cudnn.conv
    monkeypatch.setattr(of_conv, "fp32_precision", precision)

    def rounded(values: Tensor) -> Tensor:
        return ((values.contiguous().view(torch.int32) + 2**12) & ~(2**13 - 1)).view(
            torch.float32
        )

    def on_a_gpu(
        conv: nn.Conv2d, inputs: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        operands = (
            (rounded(inputs), rounded(weight))
            if of_conv.fp32_precision == "tf32"
            else (inputs, weight)
        )
        return whole(conv, *operands, bias)

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", on_a_gpu)
    model = trained(
        build_model("resnet20", num_classes=10, channels=3, size=32), images().float()
    )
    folding = fold(model, images().float())[1]
    assert (len(folding.folded), folding.left) == (19, {})
    assert of_conv.fp32_precision == precision, "it is as before"


class NormThenAct(nn.BatchNorm2d):
    """BatchNorm with its own modules after it, as timm's ``BatchNormAct2d``."""

    def __init__(
        self, channels: int, act: nn.Module, drop: nn.Module | None = None
    ) -> None:
        super().__init__(channels)
        self.drop = drop or nn.Identity()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


class Scaling(NormThenAct):
    """A layer that does more than its modules."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.5


class Disorderly(NormThenAct):
    """A layer that lists its modules in another order than it calls them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.act(nn.BatchNorm2d.forward(self, x)))


ACTS = [
    nn.ReLU(inplace=True),
    nn.PReLU(4),
    nn.Hardswish(),
    nn.Identity(),
    nn.Sequential(nn.SiLU(), nn.Tanh()),
]


@pytest.mark.parametrize("act", ACTS, ids=lambda act: type(act).__name__)
def test_a_batchnorm_with_modules_of_its_own_leaves_these(act: nn.Module) -> None:
    layers = (
        nn.Conv2d(3, 4, 3),
        NormThenAct(4, act, nn.Dropout(0.5)),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
    )
    model = trained(net(*layers), images())
    new, report = fold(model, images())
    assert dict(report.folded) == {"1": "0", "3": "2"}
    assert report.left == {}
    kinds = [(name, type(module)) for name, module in new[1].named_children()]
    assert kinds == [("drop", nn.Dropout), ("act", type(act))]
    with torch.no_grad():
        torch.testing.assert_close(
            new(images()), model(images()), rtol=1e-12, atol=1e-12
        )


def test_a_batchnorm_that_does_more_than_its_modules_is_left() -> None:
    for kind, drop in ((Scaling, None), (Disorderly, nn.Softplus())):
        check(
            net(nn.Conv2d(3, 4, 3), kind(4, nn.ReLU(), drop)),
            images(),
            0,
            "would change the outputs",
        )


@pytest.mark.parametrize(
    ("name", "folded", "layers"), [("hardcorenas_a", 34, 34), ("mixnet_s", 15, 49)]
)
def test_timms_batchnorm_with_an_activation_is_folded(
    name: str, folded: int, layers: int
) -> None:
    """In mixnet, layers stay if several convolutions join into their input."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    example = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    model = trained(
        timm.create_model(name, pretrained=False, num_classes=3).double(), example
    )
    new, report = fold(model, example)
    assert (len(report.folded), len(report.left)) == (folded, layers - folded)
    kinds = dict(model.named_modules())
    assert {type(kinds[path]).__name__ for path in report.folded} == {"BatchNormAct2d"}
    assert {*report.left.values()} <= {
        "its input is not the output of one convolution or linear layer"
    }
    with torch.no_grad():
        expected = model(example)
        assert float((new(example) - expected).abs().max()) < 1e-12 * float(
            expected.abs().max()
        )
