"""TorchScript hides the types of layers, so it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedbn_flwr.batchnorm.adaptation import evaluate_adapted
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.batchnorm.reestimation import reestimate_statistics
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.norms import replace_norm
from fedbn_flwr.strategies.fixbn import FreezeBN, MeasureDrift
from fedbn_flwr.strategies.staticbn import Untracked
from fedbn_flwr.training.evaluation import evaluate

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning"
)


@pytest.fixture
def scripted(mlp: Any) -> nn.Module:
    return torch.jit.script(mlp())


ACTS = {
    "test-bn=batch": lambda model, data: evaluate_adapted(model, data, "batch"),
    "test-bn=mix": lambda model, data: evaluate_adapted(model, data, "mix"),
    "a norm": lambda model, data: replace_norm(model, "group"),
    "a test": evaluate,
    "a split": lambda model, data: split_state(nn.Sequential(model)),
    "re-estimation": lambda model, data: reestimate_statistics(
        model, data, batch_size=4
    ),
    "StaticBN": lambda model, data: Untracked().begin(model.train()),
    "FixBN": lambda model, data: FreezeBN(affine=True).begin(model.train()),
    "an automatic T*": lambda model, data: MeasureDrift().begin(model.train()),
}


@pytest.mark.parametrize("act", ACTS)
def test_everything_about_batchnorm_refuses_it(
    scripted: nn.Module, points, act: str
) -> None:
    with pytest.raises(NormLayerError, match=r"TorchScript.*Use the plain module"):
        ACTS[act](scripted, points(8))
