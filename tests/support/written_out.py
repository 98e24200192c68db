"""Rounds written out in plain torch, on networks of torchvision in float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import nn
from torchvision.models import VisionTransformer

from fedbn_flwr.messages.records import to_state
from tests.support.seeds import with_seed
from tests.support.small_vision import VISION

State = dict[str, np.ndarray]


@with_seed()
def network(name: str = "densenet", classes: int = 3) -> nn.Module:
    if name == "vit":
        return VisionTransformer(16, 8, 2, 2, 8, 16, num_classes=classes).double()
    return VISION[name](num_classes=classes).double()


def below(model: nn.Module, *prefixes: str) -> set[str]:
    return {name for name in model.state_dict() if name.startswith(prefixes)}


def numbers(model: nn.Module) -> State:
    return {name: a.copy() for name, a in to_state(model.state_dict()).items()}


def close(
    found: Mapping,
    wanted: Mapping,
    rtol: float = 1e-12,
    atol: float = 1e-12,
) -> None:
    """Check that each wanted entry is there, up to these errors."""
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol, atol, err_msg=name)
