"""``timm:NAME`` and ``smp:ARCHITECTURE/ENCODER`` work as the other models do.

This applies to shapes, norms and strategies.
"""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.models import build_model, input_shape, load_initial
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.norms import batchnorm_places
from tests.support.fast import fast
from tests.support.pixels import SETTINGS as SEGMENTATION

TIMM, FUSED, SEG = (
    "timm:test_resnet",
    "timm:test_efficientnet",
    "smp:DeepLabV3Plus/mobilenet_v2",
)


def build(name: str, channels: int = 3, size: int = 64, **more: Any) -> nn.Module:
    return build_model(name, num_classes=5, channels=channels, size=size, **more)


@pytest.mark.parametrize(
    ("name", "native", "wanted"),
    [
        (TIMM, (1, 8), (1, 64)),
        (TIMM, (3, 100), (3, 100)),
        ("timm:test_vit", (1, 64), (1, 160)),
        (SEG, (3, 64), (3, 64)),
        (SEG, (1, 100), (1, 128)),
    ],
)
def test_input_shape_and_logits_at_it(
    name: str, native: tuple[int, int], wanted: tuple[int, int]
) -> None:
    assert input_shape(name, *native) == wanted
    channels, side = wanted
    logits = build(name, *native).eval()(torch.zeros(2, channels, side, side))
    assert tuple(logits.shape) == ((2, 5, side, side) if name == SEG else (2, 5))


@pytest.mark.parametrize(
    ("name", "layers", "norm"),
    [
        (TIMM, 15, "wsconv"),
        (FUSED, 13, "wsconv"),
        (FUSED, 13, "group"),
        (SEG, 61, "group"),
    ],
)
def test_norms_are_replaced(name: str, layers: int, norm: str) -> None:
    assert len(batchnorm_places(build(name))) == layers
    torch.manual_seed(1)
    again = build(name, norm=norm, norm_groups=1)
    assert len(batchnorm_places(again)) == 0
    assert bool(torch.isfinite(again.eval()(torch.randn(2, 3, 64, 64))).all())
    same = build(name, norm=norm, norm_groups=1).state_dict()
    assert all(
        torch.equal(value, same[key]) for key, value in again.state_dict().items()
    )


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("timm:resnet81", r"cannot be built: .*resnet81"),
        ("smp:DeepLabV3Plus", "cannot be built"),
        ("smp:DeepLab/resnet18", "cannot be built: .*DeepLab"),
        ("smp:Unet/resnet17", "cannot be built: .*resnet17"),
        ("smp:DPT/resnet18", "cannot be built: Only Timm encoders"),
    ],
)
def test_unknown_names_are_refused_by_the_packages(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build(name)


@pytest.mark.parametrize("name", [TIMM, SEG])
def test_a_missing_package_names_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules,
        {"timm": "timm", "smp": "segmentation_models_pytorch"}[name.partition(":")[0]],
        None,
    )
    with pytest.raises(
        ConfigError, match=rf'pip install "\.\[{name.partition(":")[0]}\]"'
    ):
        build(name)


def test_published_weights_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replaced loaders return a seeded network without a download."""
    import segmentation_models_pytorch as smp
    import timm

    real, encoder = timm.create_model, smp.encoders.get_encoder
    monkeypatch.setattr(
        timm,
        "create_model",
        lambda name, pretrained, **more: real(name, pretrained=False, **more),
    )
    monkeypatch.setattr(
        smp.encoders,
        "get_encoder",
        lambda name, weights, **more: encoder(name, weights=None, **more),
    )
    before = torch.get_rng_state()
    report = load_initial(build(TIMM, 1), "timm", TIMM, 1)
    assert [entry.name for entry in report.other_shape] == ["fc.weight", "fc.bias"]
    assert not report.missing + report.unused
    report = load_initial(build(SEG, 1), "smp", SEG, 1)
    assert all(name.startswith("encoder.") for name in report.loaded)
    assert not any(name.startswith("encoder.") for name in report.missing)
    assert not report.unused + report.other_shape
    assert torch.equal(before, torch.get_rng_state())

    def offline(*args: Any, **more: Any) -> None:
        raise builtins.RuntimeError("no route to host")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(
        ConfigError,
        match="init=timm: the weights could not be fetched: no route to host",
    ):
        load_initial(
            build_model("lenet", num_classes=2, channels=1, size=28), "timm", TIMM, 1
        )


RUNS = [(FUSED, "fedtan"), (FUSED, "fixbn"), (SEG, "silobn")]


@pytest.mark.parametrize(("name", "strategy"), fast(RUNS, *RUNS[:1]))
def test_strategies_run_on_them(name: str, strategy: str, tmp_path: Path) -> None:
    settings = {
        "strategy": strategy,
        "model": name,
        "num-clients": 2,
        "num-server-rounds": 1,
        "local-steps": 1,
    }
    settings |= {
        "batch-size": 2,
        "image-size": 64,
        "learning-rate": 0.01,
        "freeze-at": 0,
    }
    if name == SEG:
        del settings["image-size"]
        settings |= SEGMENTATION
    else:
        settings |= {"dataset": "digits", "partition": "iid", "image-size": 32}
    config, _ = Config.make_of_shared(
        {"freeze-at": 0}, {k: v for k, v in settings.items() if k != "freeze-at"}
    )
    summary = run(config, tmp_path / "out")
    assert summary["rounds"] == 1
    assert not summary["rejected"]
