"""Models: the registry, the input that each model needs, and the seeded build (torch and torchvision only)."""

from __future__ import annotations

from fedbn_flwr.models.info import ModelInfo
from fedbn_flwr.models.registry import MODELS, build_model, input_shape, model_info

__all__ = ["MODELS", "ModelInfo", "build_model", "input_shape", "model_info"]
