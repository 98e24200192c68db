"""Number of layers, paths and a forward pass of torchvision's own models."""

from __future__ import annotations

import pytest
import torch
import torchvision.models
from torch import nn

from fedbn_flwr.norms import NORMS, replace_norm
from tests.support.fast import fast

# ResNet-18: 17 and one for each of 3 shortcuts. DenseNet-121: one before each of 58 x 2
# convolutions of its blocks and of 3 transitions, one after the stem, one at the end.
# MobileNetV2: one after each convolution.
LAYERS = {"resnet18": 20, "mobilenet_v2": 52, "densenet121": 121}
CHANGED = {"batch", "fixup"}  # fixup: test_fixup.py
ABOUT_CONVOLUTIONS = {"group+ws", "wsconv"}
# All convolutions; in DenseNet the stem and the first of each of 58 layers are followed
# by a norm, the others go to a concatenation, a pooling or an activation.
CONVOLUTIONS = {
    ("densenet121", "group+ws"): 59,
    ("densenet121", "wsconv"): 120,
    **{
        (name, kind): LAYERS[name]
        for name in ("resnet18", "mobilenet_v2")
        for kind in ABOUT_CONVOLUTIONS
    },
}


@pytest.fixture(scope="module", params=fast(LAYERS, "resnet18", "mobilenet_v2"))
def named(request: pytest.FixtureRequest) -> tuple[str, nn.Module]:
    return request.param, torchvision.models.get_model(request.param, num_classes=5)


@pytest.mark.parametrize("kind", [kind for kind in NORMS if kind not in CHANGED])
def test_all_layers_of_a_torchvision_model(
    named: tuple[str, nn.Module], kind: str
) -> None:
    name, model = named
    new, report = replace_norm(model, kind)
    norm_rows = [row for row in report.replaced if row.old.startswith("BatchNorm")]
    assert len(norm_rows) == LAYERS[name]
    assert len(report.replaced) - len(norm_rows) == CONVOLUTIONS.get((name, kind), 0)
    for row in report.replaced:
        old = nn.BatchNorm2d if row in norm_rows else nn.Conv2d
        assert type(model.get_submodule(row.path)) is old
        changed = type(new.get_submodule(row.path))
        assert changed.__name__ == row.new.partition("(")[0]
    paths = [row.path for row in report.replaced]
    assert paths == [path for path, _ in model.named_modules() if path in paths]
    # All entries outside the replaced norms stay, by name and in order.
    gone = {"running_mean", "running_var", "num_batches_tracked"}
    if kind in ("none", "wsconv"):
        gone |= {"weight", "bias"}
    norm_entries = {f"{row.path}.{leaf}" for row in norm_rows for leaf in gone}
    added = set()
    if kind == "wsconv":  # a bias replaces the shift of the norm
        added = {f"{path}.bias" for path in paths}
    kept = [key for key in model.state_dict() if key not in norm_entries | added]
    assert kept == [key for key in new.state_dict() if key not in added]
    with torch.no_grad():
        assert new(torch.zeros(1, 3, 64, 64)).shape == (1, 5)
