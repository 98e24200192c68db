"""Models: the registry, the input of each model, the seeded build, and initial weights.
Torch and torchvision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbn_flwr.lab.models.info import ModelInfo
from fedbn_flwr.lab.models.own import code_changed, code_sha256
from fedbn_flwr.lab.models.registry import MODELS, build_model, input_shape, model_info
from fedbn_flwr.lazy import imported_when_used

if TYPE_CHECKING:
    from fedbn_flwr.lab.models.initial import InitReport, load_initial
else:
    __getattr__, __dir__ = imported_when_used(
        __name__, {"InitReport": "initial", "load_initial": "initial"}
    )

__all__ = [
    "MODELS",
    "InitReport",
    "ModelInfo",
    "build_model",
    "code_changed",
    "code_sha256",
    "input_shape",
    "load_initial",
    "model_info",
]
