"""Rounds written out in plain torch, on networks of torchvision in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torchvision.models import VisionTransformer

from fedbn_flwr.messages.records import to_state
from tests.support.small_vision import VISION

State = dict[str, np.ndarray]


def network(name: str = "densenet", classes: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "vit":
            return VisionTransformer(16, 8, 2, 2, 8, 16, num_classes=classes).double()
        return VISION[name](num_classes=classes).double()


def below(model: nn.Module, *prefixes: str) -> set[str]:
    return {name for name in model.state_dict() if name.startswith(prefixes)}


def numbers(model: nn.Module) -> State:
    return {name: a.copy() for name, a in to_state(model.state_dict()).items()}


def close(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, array in wanted.items():
        np.testing.assert_allclose(
            found[name], array, rtol=1e-12, atol=1e-12, err_msg=name
        )
