"""Models to take away: BatchNorm folded, inputs normalised inside, in formats that need
no part of this package.
"""

from __future__ import annotations

from fedbn_flwr.lab.export.folding import Folding, fold
from fedbn_flwr.lab.export.formats import (
    encode_onnx,
    encode_torch_export,
    run_onnx,
    run_torch_export,
)
from fedbn_flwr.lab.export.normalise import Normalise, normalised_inside

__all__ = [
    "Folding",
    "Normalise",
    "encode_onnx",
    "encode_torch_export",
    "fold",
    "normalised_inside",
    "run_onnx",
    "run_torch_export",
]
