"""TorchScript BatchNorm works if no method acts on the layer.

Otherwise, it is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedbn_flwr.batchnorm.adaptation import TEST_BN_MODES, evaluate_adapted
from fedbn_flwr.batchnorm.reestimation import reestimate_statistics
from fedbn_flwr.batchnorm.replaced_forward import layers_in_training
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.norms import NORMS, replace_norm
from fedbn_flwr.strategies.fixbn import FreezeBN, MeasureDrift
from fedbn_flwr.strategies.staticbn import Untracked
from fedbn_flwr.training.evaluation import evaluate, without_running_statistics

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning"
)


@pytest.fixture
def scripted(mlp: Any) -> nn.Module:
    model: nn.Module = torch.jit.script(mlp())
    return model


def without(model: nn.Module, data: Any) -> None:
    with without_running_statistics(model):
        evaluate(model, data)


ACTS: dict[str, Callable[[nn.Module, Any], object]] = {
    **{
        f"test-bn={mode}": lambda model, data, mode=mode: evaluate_adapted(
            model, data, mode
        )
        for mode in TEST_BN_MODES
    },
    **{
        kind: lambda model, data, kind=kind: replace_norm(model, kind)
        for kind in NORMS
        if kind not in ("batch", "fixup")
    },
    "the batch's statistics": without,
    "re-estimation": lambda model, data: reestimate_statistics(
        model, data, batch_size=4
    ),
    **{
        name: lambda model, data, hook=hook: hook().begin(model.train())
        for name, hook in {
            "StaticBN": Untracked,
            "FixBN": lambda: FreezeBN(affine=True),
            "an automatic T*": MeasureDrift,
        }.items()
    },
}


@pytest.mark.parametrize("act", ACTS)
def test_what_acts_on_the_layer_refuses_it(
    scripted: nn.Module, points: Any, act: str
) -> None:
    with pytest.raises(
        NormLayerError,
        match=r"layer '1', because it is a RecursiveScriptModule.*Use the plain module",
    ):
        ACTS[act](scripted, points(8))


def test_what_does_not_act_on_it_works(
    scripted: nn.Module, mlp: Any, points: Any
) -> None:
    data = points(8)
    assert evaluate_adapted(scripted, data, None) == evaluate(mlp(), data)
    assert not replace_norm(scripted, "batch")[1]
    FreezeBN(affine=False).begin(torch.jit.script(mlp(norm=False)))


def test_a_scripted_backbone_in_eval_mode_is_left_as_it_is(mlp: Any) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.back, self.head = (
                torch.jit.script(mlp()),
                nn.Sequential(nn.BatchNorm1d(10), nn.Linear(10, 10)),
            )

        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.back.eval()
            return self

    model = Frozen().eval()
    assert list(layers_in_training(model)) == ["head.0"]
    assert not any(module.training for module in model.modules())
