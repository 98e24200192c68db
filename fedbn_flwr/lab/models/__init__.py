"""Models: the registry, the input of each model, the seeded build, and initial weights. Torch and torchvision."""

from __future__ import annotations

from fedbn_flwr.lab.models.info import ModelInfo
from fedbn_flwr.lab.models.initial import InitReport, load_initial
from fedbn_flwr.lab.models.own import code_changed, code_sha256
from fedbn_flwr.lab.models.registry import MODELS, build_model, input_shape, model_info

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
