"""Normalisation: the registry of norms and the replacement of BatchNorm layers (torch
only).
"""

from __future__ import annotations

from fedbn_flwr.norms.feature import FeatureScale, use_feature_norm
from fedbn_flwr.norms.registry import NORMS, NormInfo, replace_norm
from fedbn_flwr.norms.report import NormReport, Replacement
from fedbn_flwr.norms.swap import batchnorm_places

__all__ = [
    "NORMS",
    "FeatureScale",
    "NormInfo",
    "NormReport",
    "Replacement",
    "batchnorm_places",
    "replace_norm",
]
__all__ += ["use_feature_norm"]
