"""Feature normalisation: its five laws, on models that are not ours, and where it is refused."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest
import torch
import torchvision.models
from torch import Tensor, nn
from torch.nn import functional

from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.models import build_model
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.setup import make_model
from fedbn_flwr.norms import use_feature_norm
from fedbn_flwr.norms.feature import NormalisedLinear


def normalised(layer: nn.Linear, x: Tensor, scale: Any = "sqrt-d") -> Tensor:
    """The features that a normalised classifier uses: its outputs with unit weights and no bias."""
    features = nn.Linear(layer.in_features, layer.in_features, bias=False).double()
    with torch.no_grad():
        features.weight.copy_(torch.eye(layer.in_features))
    use_feature_norm(features, scale)
    out: Tensor = features(x)
    return out


@pytest.fixture
def x() -> Tensor:
    return torch.randn(7, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("scale", ["sqrt-d", "1"])
def test_features_have_a_fixed_length(x: Tensor, scale: Any) -> None:
    length = 12**0.5 if scale == "sqrt-d" else 1.0
    found = normalised(nn.Linear(12, 3), x, scale)
    torch.testing.assert_close(found.norm(dim=1), torch.full((7,), length, dtype=torch.float64), rtol=1e-15, atol=0)
    torch.testing.assert_close(found, length / 12**0.5 * functional.rms_norm(x, (12,), eps=0), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("name", ["resnet18", "densenet121", "mobilenet_v3_small"])
def test_the_length_of_the_features_does_not_matter_to_a_torchvision_model(name: str) -> None:
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, num_classes=5).double().eval()
    before = list(model.state_dict())
    changed, report = use_feature_norm(model)
    ((path, old, new),) = report
    head = changed.get_submodule(path)
    assert (type(head), old.startswith("Linear("), new.startswith("NormalisedLinear(")) == (
        NormalisedLinear,
        True,
        True,
    )
    assert list(changed.state_dict()) == before
    inputs = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    seen: list[Tensor] = []
    with torch.no_grad():
        handle = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        plain = changed(inputs)
        handle.remove()
        fixed = functional.rms_norm(seen[0], seen[0].shape[1:], eps=0)
        torch.testing.assert_close(plain, functional.linear(fixed, head.weight, head.bias), rtol=1e-14, atol=1e-15)
        handle = head.register_forward_pre_hook(lambda _, args: (args[0] * 37.5,))
        torch.testing.assert_close(changed(inputs), plain, rtol=1e-14, atol=1e-15)
        handle.remove()
        assert plain.shape == (2, 5)


def relu_net(widths: list[int], after: Any) -> nn.Sequential:
    """Linear layers with ReLU; the biases are zero from the second on; ``after(features)`` follows each ReLU."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for i in range(len(widths) - 1):
        layers.append(nn.Linear(widths[i], widths[i + 1]))
        if i:
            nn.init.zeros_(layers[-1].bias)
        layers += [nn.ReLU(), after()] if i < len(widths) - 2 else []
    return nn.Sequential(*layers).double()


class Rule(nn.Module):
    def __init__(self, rule: Any) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rule(x)
        return out


def rms(x: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[1],), eps=0)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def test_after_every_layer_is_after_the_last_layer_alone(x: Tensor) -> None:
    """Proposition 1 of arXiv:2308.09565; the last layer here is ours."""
    everywhere, last = relu_net([12, 20, 16, 4], lambda: Rule(rms)), relu_net([12, 20, 16, 4], nn.Identity)
    use_feature_norm(last)
    torch.testing.assert_close(last(x), everywhere(x), rtol=1e-14, atol=1e-14)


def test_layer_norm_everywhere_is_the_mean_everywhere_and_feature_norm_at_the_end(x: Tensor) -> None:
    """Proposition 2."""
    layer = relu_net([12, 20, 16, 4], lambda: Rule(lambda y: rms(centred(y))))
    mean = relu_net([12, 20, 16, 4], lambda: Rule(centred))
    use_feature_norm(mean)
    torch.testing.assert_close(mean(x), layer(x), rtol=1e-14, atol=1e-14)


def test_features_that_are_all_zero_stay_zero_and_get_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        model[0].bias.fill_(-1e3)
    use_feature_norm(model)
    out = model(torch.randn(5, 4, dtype=torch.float64))
    torch.testing.assert_close(out, model[2].bias.expand(5, 3))
    out.square().sum().backward()
    assert model[0].weight.grad.abs().max() == 0
    assert torch.isfinite(model[2].weight.grad).all()


def test_features_that_are_exactly_zero_without_a_relu_get_the_gradient_of_the_floor() -> None:
    """As the page says: x / 1e-12 has a slope of 1e12."""
    head = use_feature_norm(nn.Linear(4, 3).double())[0]
    x = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    head(x).sum().backward()
    torch.testing.assert_close(x.grad, 2e12 * head.weight.sum(0, keepdim=True), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_takes_the_length_in_float32(dtype: torch.dtype) -> None:
    head = use_feature_norm(nn.Linear(400, 2).to(dtype))[0]
    x = torch.full((1, 400), 300.0, dtype=dtype)  # the sum of squares is above float16's largest
    out = head(x)
    assert out.dtype == dtype
    ones = functional.linear(torch.ones(1, 400), head.weight.float(), head.bias.float())
    torch.testing.assert_close(out.float(), ones, rtol=0.02, atol=0.02)
    wide = use_feature_norm(nn.Linear(400, 2))[0]
    with torch.autocast("cpu", dtype):
        assert wide(x.float()).dtype == dtype


def test_a_model_without_a_plain_classifier_is_refused_by_name() -> None:
    with pytest.raises(NormLayerError, match="SqueezeNet has no linear layer"):
        use_feature_norm(torchvision.models.squeezenet1_1(weights=None))
    with pytest.raises(NormLayerError, match=r"the last linear layer of .*, 'fc', is a BiasedLinear"):
        build_model("resnet20", num_classes=10, channels=3, size=32, norm="fixup", feature_norm="sqrt-d")


class HeadFirst(nn.Module):
    """Registers its classifier before its body."""

    def __init__(self, num_classes: int, channels: int, size: int) -> None:
        super().__init__()
        self.head = nn.Linear(6, num_classes)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, 6), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def test_a_layer_that_is_not_the_classifier_is_refused_by_name(write_cityscapes, tmp_path, monkeypatch) -> None:
    sizes = {"num_classes": 5, "channels": 3, "size": 32, "feature_norm": "sqrt-d"}
    with pytest.raises(
        NormLayerError, match=r"'encoder\.block4\.1\.mlp\.fc2', the last .* has 256 outputs, and .* has 5:"
    ):
        build_model("smp:Unet/mit_b0", **sizes)
    monkeypatch.setitem(sys.modules, "users", types.SimpleNamespace(net=HeadFirst))
    with pytest.raises(NormLayerError, match=r"'body\.1', the last .* 6 outputs, .*Register the classifier last"):
        build_model("users:net", **sizes)
    folder = write_cityscapes(tmp_path, {"aachen": 2}, {"lindau": 1}, (32, 64))
    data = {"dataset": "cityscapes", "data-dir": str(folder), "partition": "natural"}
    with pytest.raises(ConfigError, match=r"feature-norm is for a vector of features .* segmentation"):
        Config.make({**data, "model": "smp:Unet/mit_b0", "feature-norm": "sqrt-d"})


def test_a_run_says_which_layer_is_normalised(tmp_path, caplog) -> None:
    keys = {"num-clients": 2, "num-server-rounds": 1, "local-steps": 1, "feature-norm": "sqrt-d"}
    with caplog.at_level(logging.INFO, "flwr"):
        run(Config.make(keys), tmp_path / "out")
    assert "feature-norm: 'fc' is the classifier" in caplog.text


def test_it_is_a_key_beside_every_norm() -> None:
    base = {"dataset": "digits", "model": "mlp"}
    for norm in ("batch", "layer", "none"):
        model = make_model(Config.make({**base, "norm": norm, "feature-norm": "1"}))
        heads = [module for module in model.modules() if isinstance(module, NormalisedLinear)]
        assert [head.feature_scale for head in heads] == ["1"]
    assert not any(isinstance(module, NormalisedLinear) for module in make_model(Config.make(base)).modules())
